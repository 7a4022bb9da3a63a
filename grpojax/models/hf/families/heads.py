"""Which numbers of heads go with a hidden size, in families that do not take all."""

from grpojax.host.errors import UserError
from grpojax.models.hf.fields import Fields


def whole(fields: Fields, hidden: int, heads: int) -> None:
    """The hidden size is a multiple of the number of heads."""
    if hidden % heads:
        raise UserError(
            f"{fields.where}: hidden_size={hidden} does not divide by num_attention_heads={heads}; correct it"
        )


def whole_by_default(fields: Fields, hidden: int, heads: int) -> None:
    """As `whole`, unless config.json says how large a head is."""
    if fields.raw.get("head_dim") is None:
        whole(fields, hidden, heads)


def exact(fields: Fields, hidden: int, heads: int) -> None:
    """All heads together have the hidden size."""
    if fields.whole("head_dim") * heads != hidden:
        fields.refuse("head_dim", f"times num_attention_heads={heads} must be hidden_size={hidden}")
