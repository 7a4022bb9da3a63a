"""Checks of shapes. They read no values, so that they cost nothing in a compiled program."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpojax.types import Array

Sizes = dict[str, Any]  # axis to its size, "..." to the sizes of the leading axes


def shape_of(x: Array) -> tuple[int, ...]:
    """The shape of an array, of a tracer, or of what numpy makes an array of.

    Example:
      >>> shape_of([[1.0, 2.0]]), shape_of(0.5)
      ((1, 2), ())
    """
    shape = getattr(x, "shape", None)
    return tuple(np.shape(x) if shape is None else shape)


def check(function: str, axes: str, sizes: Mapping[str, Any] | None = None, /, **arrays: Array | None) -> Sizes:
    """Raises `ValueError` unless each array has these axes, the same letter with the same size in all of them.

    Args:
      function: the name of the function that was called, for the error.
      axes: letters such as ``"P G T"``; ``"..."`` in front stands for any number of axes, the same in all arrays.
      sizes: what an earlier check of the same call has found.
      arrays: by the name that the caller knows them by. None is left out.

    Returns:
      ``sizes`` with those found here, for the next check.

    Example:
      >>> sizes = check("f", "P G T", mask=np.ones((3, 5, 7)))
      >>> check("f", "P G", sizes, rewards=np.ones((3, 4)))
      Traceback (most recent call last):
      ValueError: f: rewards has shape (3, 4), wanted [P, G] = (3, 5)
    """
    known = dict(sizes or {})
    letters = axes.split()
    leading = letters[:1] == ["..."]
    if leading:
        letters = letters[1:]
    for name, array in arrays.items():
        if array is None:
            continue
        shape = shape_of(array)
        cut = len(shape) - len(letters)
        found: Sizes = dict(zip(letters, shape[max(cut, 0) :], strict=False))
        if leading:
            found["..."] = shape[: max(cut, 0)]
        if cut < 0 or (cut > 0 and not leading) or any(known.get(k, v) != v for k, v in found.items()):
            raise ValueError(f"{function}: {name} has shape {shape}, wanted {_wanted(name, axes, known, shape)}")
        known |= found
    return known


def _wanted(name: str, axes: str, known: Mapping[str, Any], shape: tuple[int, ...]) -> str:
    """The axes in words, with their sizes where all are known, and what to do where a sample's number is given."""
    text = f"[{', '.join(axes.split())}]"
    if not all(letter in known for letter in axes.split()):
        sizes = [f"{letter} = {known[letter]}" for letter in axes.split() if letter in known]
        return f"{text} with {', '.join(sizes)}" if sizes else text
    whole: tuple[int, ...] = ()
    for letter in axes.split():
        whole += known[letter] if letter == "..." else (known[letter],)
    text = f"{text} = {whole}" if whole else "a number, []"
    if axes.endswith("T") and shape == whole[:-1]:
        text += f"; one number a sample is given to its tokens by jnp.broadcast_to({name}[..., None], {whole})"
    return text
