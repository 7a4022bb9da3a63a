"""Fields of a JSON object, each as the kind that it must have, or refused by name."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from grpojax.host.errors import UserError, require

LARGEST = 2**31 - 1  # sizes are counted in int32 on devices
_NONE: Mapping[str, Any] = MappingProxyType({})


class Sizes(NamedTuple):
    """The sizes of a model, which a family's own fields may depend on."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    positions: int


class Fields:
    """The fields of a JSON object, each as the kind that it must have, or refused by name.

    Args:
      raw: the object.
      where: what to call it in errors.
      missing: what stands for a field that the object does not have.
      elsewhere: what to call, in errors, the place of a field that the user's file has in another object.

    Example:
      >>> fields = Fields({"heads": 4}, "config.json", missing={"layers": 2})
      >>> fields.whole("heads"), fields.whole("layers"), fields.flag("tied")
      (4, 2, False)
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        *,
        missing: Mapping[str, Any] = _NONE,
        elsewhere: Mapping[str, str] = _NONE,
    ):
        self.raw, self.where, self.missing, self._elsewhere = raw, where, missing, elsewhere

    def _place(self, key: str) -> str:
        return self._elsewhere.get(key, self.where)

    def get(self, key: str) -> Any:
        """A field as it stands."""
        if key not in self.raw and key not in self.missing:
            raise UserError(f"{self._place(key)}: {key!r} is missing; add it, or download the file again")
        return self.raw[key] if key in self.raw else self.missing[key]

    def whole(self, key: str, *, null: int | None = None, most: int = LARGEST) -> int:
        """A whole number from 1 on. ``null`` stands for null; None refuses it."""
        value = null if (given := self.get(key)) is None else given
        if type(value) is not int or not 1 <= value <= most:
            self.refuse(key, f"must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, interval: str) -> float:
        """A finite number in an interval, as `grpojax.host.errors.require` has it."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            self.refuse(key, "must be a number")
        try:
            require(SimpleNamespace(**{key: value}), **{key: interval})
        except UserError as e:
            raise UserError(f"{self._place(key)}: {e}") from None
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false, which null is too, and a field that is missing unless ``missing`` has it."""
        value = self.raw.get(key, self.missing.get(key))
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return bool(value)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises the `UserError` for a field."""
        raise UserError(f"{self._place(key)}: {key}={shown(self.raw.get(key))}: {why}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
