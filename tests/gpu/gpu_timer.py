# SPDX-License-Identifier: MIT
"""Times on a GPU, by PyTorch's events: of whoever is compared, by turns."""


def once(torch, launches, n):
    """Milliseconds of one launch among n in a row, each on its own inputs, behind one that does not count, so that the GPU never waits
    for the host."""
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launches[-1]()
    a.record()
    for i in range(n):
        launches[i % len(launches)]()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / n


def by_turns(torch, sides, reps, n):
    """{name: launches}, {name: how many at once} -> {name: the median of milliseconds}."""
    times = {name: [] for name in sides}
    for _ in range(reps):
        for name, launches in sides.items():
            times[name].append(once(torch, launches, n[name]))
    return {name: sorted(x)[len(x) // 2] for name, x in times.items()}


def compare(torch, sides, reps=20):
    """by_turns() of a few milliseconds each."""
    n = {}
    for name, launches in sides.items():
        for f in launches:
            f()
        n[name] = max(3, min(12, int(3 / max(once(torch, launches, 3), 1e-3)) // 3 * 3))
    return by_turns(torch, sides, reps, n)


def compare_graphs(torch, sides, n, reps=9):
    """{name: launch(i)} -> microseconds of one of n launches of a graph."""
    graphs = {}
    for name, launch in sides.items():
        for i in range(3):
            launch(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(n):
                launch(i)
        graphs[name] = [graph.replay]
    return {name: ms * 1e3 / n for name, ms in by_turns(torch, graphs, reps, dict.fromkeys(graphs, 1)).items()}


def copy_rate(torch):
    """GB/s that a large copy reads and writes."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    copy = [lambda: y.copy_(x)]
    return 2 * x.numel() / by_turns(torch, {"": copy}, 8, {"": 4})[""] / 1e6
