"""What packed rows say, and what a first-fit packing is. Nothing here imports grpojax."""

import itertools

import numpy as np


def check_first_fit(bins, lengths, size):
    """Asserts that ``bins`` is a first-fit packing of ``lengths``, longest first."""
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert all(load <= size for load in loads)
    assert all(lengths[i] >= lengths[j] for b in bins for i, j in itertools.pairwise(b))
    for load, later in ((loads[a], bins[b]) for a, b in itertools.combinations(range(len(bins)), 2)):
        assert all(load + lengths[i] > size for i in later), "an item would have fitted into an earlier bin"


def read_rows(rows):
    """All that `Rows` ``[M, B, ...]`` says: a list of (micro-batch, lane, prompt, completions)."""
    out = []
    for m, b, r in np.ndindex(rows.row_prompt.shape):
        k = rows.row_prompt[m, b, r]
        prompt = rows.prompts[m, b, k][: rows.prompt_lengths[m, b, k]].tolist()
        places = zip(rows.segments[m, b, r], rows.offsets[m, b, r], rows.tokens[m, b, r], strict=True)
        runs = [(segment, list(run)) for segment, run in itertools.groupby(places, key=lambda place: place[0])]
        padding = [run for segment, run in runs if segment == 0]
        assert all((o, t) == (0, 0) for run in padding for _, o, t in run), "something stands on padding"
        assert not padding or runs[-1][0] == 0 and len(padding) == 1, "padding is not on the right"
        used = [(segment, run) for segment, run in runs if segment]
        assert len({segment for segment, _ in used}) == len(used), "one segment stands in two places"
        for _, run in used:
            assert [int(o) for _, o, _ in run] == list(range(len(run))), "offsets do not count from 0"
        if used:
            out.append((m, b, prompt, [[int(t) for _, _, t in run] for _, run in used]))
    return out
