"""The reference's simulator with this cluster's values, to compare the rule."""

import heapq, math, random, sys, time

sys.path.insert(0, sys.argv[1])  # the folder with the reference's placement.py
import placement as ref
from router.placement import *
from wire.step_costs import StepCosts

B0 = ref.B0
COSTS = StepCosts(
    step=ref.A, row=B0 * 0.35, row_context=B0 * 0.65 / 1100, prompts=1.0, prompt_token=ref.PROMPT, prompt_context=0.0
)


class Ours:
    def __init__(self, mean_output=None):
        self.cluster = None
        self.placed = {}
        self.mean = mean_output

    def __call__(self, sim, r, now):
        if self.cluster is None:
            self.cluster = Cluster(
                [NodeState(f"p{i}", COSTS, ref.GAP, 1 << 40) for i, _ in enumerate(sim.prefill)],
                [NodeState(f"d{i}", COSTS, ref.GAP, 1 << 40) for i, _ in enumerate(sim.decode)],
            )
            self.names = {
                **{f"p{i}": n for i, n in enumerate(sim.prefill)},
                **{f"d{i}": n for i, n in enumerate(sim.decode)},
            }
            self.number = 0
            self.live = []
            self.sim = sim
        # what nodes announce: true backlog and rows
        for name, node in self.names.items():
            st = self.cluster.prefill.get(name) or self.cluster.decode[name]
            st.backlog_ms = node.backlog_ms()
            if name[0] == "d":
                rows = [*node.rows, *[q for q in node.queue]]
                st.rows = len(node.rows) + node.coming + len(node.queue)
                st.context = sum(x.prompt + x.done for x in node.rows)
                st.delayed = sum(1 / (sim.tpot * x.output) for x in node.rows)
                st.strictest_ms = sim.tpot if node.rows else math.inf
        q = PlacementRequest(r.prompt, r.output, 0, sim.ttft + sim.per_token * r.prompt, sim.tpot, self.number)
        self.number += 1
        p = place(q, self.cluster, now)
        self.cluster.commit(q, p, now)
        return self.names[p.prefill], self.names[p.decode]


def works(seeds=(1, 2)):
    table = {
        "chat": (512, 256, 200, 15, (35, 39, 41)),
        "code": (2048, 64, 125, 20, (8, 10, 11.6, 12.5)),
        "summarise": (8192, 256, 1000, 15, (2.05, 2.35, 2.6)),
    }
    for nodes, prefill in ((2, 1), (4, 2), (4, 3)):
        for name, (prompt, output, ttft, tpot, rates) in table.items():
            for rate in rates:
                row = f"{prefill}P{nodes - prefill}D {name:10}{rate:6}"
                for told in (True, False):
                    targets = (ttft, tpot, 0.0) if told else ()
                    for label, make in (("ref", lambda: ref.priced), ("ours", Ours)):
                        met = sum(
                            ref.in_time(
                                ref.Sim(
                                    nodes,
                                    prefill,
                                    make(),
                                    ref.arrivals(random.Random(s), nodes * rate, 60, prompt, output),
                                    *targets,
                                ),
                                lambda r: ttft,
                                tpot,
                            )
                            for s in seeds
                        ) / len(seeds)
                        row += f" | {label}{'' if told else ' nt'} {met:5.1f}"
                print(row, flush=True)


works()
