"""Fields of a JSON object, each as the kind that it must have, or refused by name."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from grpojax.host.errors import UserError, require

LARGEST = 2**31 - 1  # sizes are counted in int32 on devices
REQUIRED: Any = object()  # in place of a default: there is none


class Fields:
    """The fields of a JSON object, each as the kind that it must have, or refused by name.

    Args:
      raw: the object.
      where: what to call it in errors.
      elsewhere: the same for the fields that the user's file has in another object.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, elsewhere: Mapping[str, str] | None = None):
        self.raw, self.where, self._elsewhere = raw, where, elsewhere or {}

    def _place(self, key: str) -> str:
        return self._elsewhere.get(key, self.where)

    def get(self, key: str, missing: Any = REQUIRED) -> Any:
        """A field as it stands; ``missing`` where there is none."""
        if key not in self.raw and missing is REQUIRED:
            raise UserError(f"{self._place(key)}: {key!r} is missing; add it, or download the file again")
        return self.raw.get(key, missing)

    def whole(self, key: str, *, missing: Any = REQUIRED, null: Any = REQUIRED, most: int = LARGEST) -> int:
        """A whole number from 1 on; ``missing`` where there is no such field, ``null`` where it is null."""
        value = self.get(key, missing)
        if value is None and null is not REQUIRED:
            return null
        if type(value) is not int or not 1 <= value <= most:
            self.refuse(key, f"must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, interval: str, *, missing: Any = REQUIRED) -> float:
        """A finite number in an interval, as `grpojax.host.errors.require` has it."""
        value = self.get(key, missing)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            self.refuse(key, "must be a number")
        try:
            require(SimpleNamespace(**{key: value}), **{key: interval})
        except UserError as e:
            raise UserError(f"{self._place(key)}: {e}") from None
        return float(value)

    def flag(self, key: str, *, missing: bool = False) -> bool:
        """True or false; ``missing`` where there is no such field, false where it is null."""
        value = self.raw.get(key, missing)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return bool(value)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises the `UserError` for a field."""
        raise UserError(f"{self._place(key)}: {key}={shown(self.raw.get(key))}: {why}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
