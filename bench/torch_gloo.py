"""PyTorch with Gloo between processes on this machine: the peer of `cargo bench -p meristem-comm`.

dense: all_reduce of N f32, in place. topk: the top k of each rank by magnitude, all_gather of values
and indices, index_add_ into zeros. Times are measured on rank 0 from a barrier on, in milliseconds.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(me, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=me, world_size=args.ranks)
    n, k = args.elements, int(args.elements * args.density)
    i = torch.arange(n, dtype=torch.int64)
    # Whole numbers, as in our bench: sums are exact in any order.
    source = (((i * 2654435761 + me * 40503) & 0x3FFFFF) - 2097152).float()
    x = source.clone()

    def dense():
        dist.all_reduce(x)
        return x

    def topk():
        _, at = torch.topk(x.abs(), k, sorted=False)
        own = x[at]
        values = [torch.empty_like(own) for _ in range(args.ranks)]
        places = [torch.empty_like(at) for _ in range(args.ranks)]
        dist.all_gather(values, own)
        dist.all_gather(places, at)
        out = torch.zeros_like(x)
        for place, value in zip(places, values):
            out.index_add_(0, place, value)
        return out

    report = {}
    for name, run in [("dense", dense), ("topk", topk)]:
        times = []
        for turn in range(args.rounds + 1):
            x.copy_(source)
            dist.barrier()
            start = time.perf_counter()
            out = run()
            if turn:
                times.append((time.perf_counter() - start) * 1e3)
        report[name] = {"min_ms": min(times), "median_ms": statistics.median(times), "max_ms": max(times)}
        if name == "dense":
            others = [
                (((i * 2654435761 + r * 40503) & 0x3FFFFF) - 2097152).float() for r in range(args.ranks)
            ]
            report[name]["wrong"] = int((out != sum(others)).sum())
    if me == 0:
        about = {"elements": n, "ranks": args.ranks, "k": k, "torch": torch.__version__}
        if args.json:
            medians = {f"{key}_ms": numbers["median_ms"] for key, numbers in report.items()}
            print(json.dumps({**about, **medians, **report}))
        else:
            print(about)
            for name, numbers in report.items():
                print(f"{name:8}", {key: round(value, 2) for key, value in numbers.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=16 << 20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    mp.spawn(rank, args=(arguments,), nprocs=arguments.ranks)
