"""PyTorch peer of `cargo bench -p meristem-control --bench policy`: one pass of a PPO update.

The policy and the loss of `reference/ppo.py` at width 512 over 4 envs x 40 steps: forward over whole
sequences, loss of eight heads, backward, clipping to norm 5, Adam. The loss is read back before the step, as
in our benchmark. PyTorch uses its fastest variant: no state is reset within the round, so that nn.LSTM takes
the sequences in one call, and the fastest implementation of Adam with one or two threads counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
import ppo  # noqa: E402

ppo.HIDDEN, ppo.FEATURES, ppo.STEPS, ppo.ENVS, ppo.RESETS = 512, 23 + 31 * 3, 40, 4, []
ADAM_KINDS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}


class Policy(ppo.Policy):
    """The policy of `reference/ppo.py`, with its LSTM in one call."""

    def forward(self, t: dict[str, Tensor]) -> Tensor:
        embedded = self.embedding(t["blueprints"]).flatten(2)
        x = self.encoder(torch.cat([t["observations"], embedded], dim=2))
        h, c = (s[None].contiguous() for s in t["state"].split(ppo.HIDDEN, dim=1))
        x = x + self.norm(self.lstm(x, (h, c))[0])
        return torch.cat([*(head(x) for head in self.heads.values()), self.value(x)], dim=2)


def measure(threads: int, kind: str, updates: int, best: float) -> list[float]:
    """Microseconds of each update; only of the warm-up, if it is far slower than `best`."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    policy, t = Policy(), ppo.rollout()
    t["blueprints"] = t["blueprints"].long()
    t["legal"] = torch.ones_like(t["legal"])
    adam = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5, **ADAM_KINDS[kind])
    with torch.no_grad():
        _, reference = ppo.loss(policy(t), t, None)
    times: list[float] = []
    for _ in range(updates + 5):
        if len(times) == 5 and min(times) > 2 * best:
            return times
        start = time.perf_counter()
        adam.zero_grad()
        parts, _ = ppo.loss(policy(t), t, reference)
        parts["loss"].backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 5.0)
        torch.stack([parts["loss"].detach(), parts["kl"].detach(), norm]).tolist()
        adam.step()
        times.append((time.perf_counter() - start) * 1e6)
    return times[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args()
    medians: dict[str, float] = {}
    for threads in (1, 2):
        for kind in ADAM_KINDS:
            best_us = min(medians.values(), default=float("inf"))
            times = measure(threads, kind, args.updates, best_us)
            medians[f"{threads} threads, {kind}"] = statistics.median(times)
    best = min(medians, key=lambda k: medians[k])
    result = {"update_us": medians[best], "best": best, "all_us": medians}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"update, 4 envs x 40 steps, width 512: {medians[best]:.0f} us ({best})")
        print("\n".join(f"  {name}: {value:.0f} us" for name, value in medians.items()))


if __name__ == "__main__":
    main()
