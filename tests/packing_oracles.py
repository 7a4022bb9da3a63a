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
    """All that `Rows` ``[M, B, ...]`` says: of each row that holds anything (micro-batch, shard, prompts, completions),
    a prompt for each completion. Prompts may stand once before several micro-batches."""
    out, alike = [], len(rows.tokens) // len(rows.prompts)
    for m, b, r in np.ndindex(rows.tokens.shape[:3]):
        told = rows.segments, rows.offsets, rows.tokens, rows.token_prompt
        places = zip(*(x[m, b, r].tolist() for x in told), strict=True)
        runs = [(segment, list(run)) for segment, run in itertools.groupby(places, key=lambda place: place[0])]
        padding = [run for segment, run in runs if segment == 0]
        assert not any(any(place) for run in padding for place in run), "something stands on padding"
        assert not padding or runs[-1][0] == 0 and len(padding) == 1, "padding is not on the right"
        used = [(segment, run) for segment, run in runs if segment]
        assert len({segment for segment, _ in used}) == len(used), "one segment stands in two places"
        for _, run in used:
            assert [o for _, o, *_ in run] == list(range(len(run))), "offsets do not count from 0"
            assert len({k for *_, k in run}) == 1, "a completion of two prompts"
        if used:
            ks = [run[0][-1] for _, run in used]
            prompts = [rows.prompts[m // alike, b, k][: rows.prompt_lengths[m // alike, b, k]].tolist() for k in ks]
            out.append((m, b, prompts, [[t for _, _, t, _ in run] for _, run in used]))
    return out
