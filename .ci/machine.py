"""How fast this machine is at this moment: products of float32 matrices, and bytes copied."""

import os
import time

import numpy as np


def best(work, rounds=5):
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


n = 2048
a = np.ones((n, n), np.float32)
big = np.ones(2**26, np.uint8)
products = 2 * n**3 / best(lambda: a @ a) / 1e9
copies = 2 * big.size / best(big.copy) / 1e9
print(f"{os.cpu_count()} cores, {products:.0f} GFLOP/s in products of {n} x {n}, {copies:.1f} GB/s of copies")
