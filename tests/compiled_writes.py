"""The arrays that a compiled program writes for each token. A sampler must not copy weights or caches."""

from grpojax.extensions.plan import hlo


def each_token(text: str, least: int) -> list[tuple[str, str, int]]:
    """Name, shape and bytes of all that instructions in loops of unknown length write into a chip's slow memory, where
    it is ``least`` bytes or more; of an update in place what is new."""
    computations, entry = hlo._parse(text)
    found = []

    def walk(name, depth):
        table = {i.name: i for i in computations[name]}
        for i in computations[name]:
            called = list(hlo._called(i))
            if i.opcode == "while":
                for inner in called:
                    walk(inner, depth + (not hlo._trips(computations, i)))
            elif i.opcode in hlo._CALLS:
                for inner in called:
                    walk(inner, depth)
            elif depth and i.opcode not in hlo._FREE and not i.opcode.endswith(("-done", "-update")):
                size = written(table, i)
                if size >= least:
                    found.append((i.name, i.shape, size))

    def written(table, i):
        if i.opcode == "fusion":
            inside = {j.name: j for j in computations[next(hlo._called(i))]}
            root = next(j for j in inside.values() if j.root)
            return hlo._written(computations, inside, root, root.shape)
        if i.opcode in hlo._PUTS:
            return hlo._written(computations, table, i, i.shape)
        sizes = hlo._arrays(i.shape, slow_only=True)
        return sizes[0] if i.opcode == "copy-start" else sum(sizes)

    walk(entry, 0)
    return found
