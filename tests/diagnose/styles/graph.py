"""GraphSAGE for the classes of a graph's nodes, with embeddings of nodes and sampled neighbours.

Faults: dense (the table of nodes' embeddings has dense gradients, exchanged and updated as a whole,
as before dmlc/dgl#2234), halves (nodes come in the order of their degrees and each rank gets one
half, so that one has the hubs, an imbalance of edges as in rusty1s/pytorch_sparse#309), trace (the
edges of all steps are kept to see what share of the graph was visited, and counted anew in each
step; lists that grow from batch to batch as in TRI-ML/packnet-sfm#47).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NODES, CLASSES, FEATURES, HIDDEN = 40_000, 8, 64, 256
DIM = 128  # of a node's embedding: "dense" costs in proportion to DIM * NODES
HUBNESS = 3  # the exponent in the degrees: the larger, the more one rank waits with "halves"
TRACED_HOPS = 2  # of the hops, 1 or 2, how many "trace" follows
HOPS, FANOUT = 2, 10


class Graph:
    """Node i has the more neighbours the smaller i is; most are of its own class, i % CLASSES."""

    def __init__(self):
        torch.manual_seed(11)
        self.labels = torch.arange(NODES) % CLASSES
        self.degrees = 1 + (24 * (1 - torch.arange(NODES) / NODES) ** HUBNESS).long()
        self.starts = self.degrees.cumsum(0) - self.degrees
        self.sources = torch.arange(NODES).repeat_interleave(self.degrees)
        ends = torch.randint(NODES, self.sources.shape)
        alike = torch.rand(self.sources.shape) < 0.7
        self.ends = torch.where(alike, ends - ends % CLASSES + self.sources % CLASSES, ends)
        self.features = torch.randn(NODES, FEATURES)
        self.features += 0.3 * torch.randn(CLASSES, FEATURES)[self.labels]
        self.local = torch.empty(NODES, dtype=torch.long)

    def sample(self, nodes, rng):
        """Returns the nodes whose inputs are needed, blocks of edges, and the edges' numbers."""
        blocks, taken_edges, slots = [], [], torch.arange(FANOUT)
        for _ in range(HOPS):
            degrees = self.degrees[nodes]
            counts = degrees.clamp(max=FANOUT)
            first = (torch.rand(len(nodes), generator=rng) * degrees).long()
            places = (first[:, None] + slots) % degrees[:, None] + self.starts[nodes][:, None]
            edges = places[slots < counts[:, None]]
            ends = self.ends[edges]
            marks = torch.zeros(NODES, dtype=torch.bool)
            marks[nodes] = marks[ends] = True
            inputs = marks.nonzero()[:, 0]
            self.local[inputs] = torch.arange(len(inputs))
            offsets = counts.cumsum(0) - counts
            blocks.insert(0, (self.local[nodes], self.local[ends], offsets))
            taken_edges.append(edges)
            nodes = inputs
        return nodes, blocks, taken_edges


class SAGE(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.nodes = nn.Embedding(NODES, DIM, sparse=sparse)
        self.first, self.second = nn.Linear(DIM + FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.own = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(HOPS))
        self.other = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(HOPS))
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs, features, blocks):
        h = self.first(torch.cat([0.1 * self.nodes(inputs), features], dim=1))
        h = self.second(h.relu()).relu()
        for i, (targets, neighbours, offsets) in enumerate(blocks):
            mean = F.embedding_bag(neighbours, h, offsets, mode="mean")
            h = (self.own[i](F.embedding(targets, h)) + self.other[i](mean)).relu()
        return self.out(h)


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch-size": 80, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
graph = Graph()
rng = torch.Generator().manual_seed(100 + rank)  # for the neighbours
sparse = args.fault != "dense"
model = DistributedDataParallel(SAGE(sparse), broadcast_buffers=False)
tables = list(model.module.nodes.parameters()) if sparse else []
others = list(model.parameters())[len(tables) :]  # the table is the first parameter
optimizers = [torch.optim.AdamW(others, lr=2e-3, fused=True)]
if tables:
    optimizers.append(torch.optim.SparseAdam(tables, lr=2e-3))

visited, trace, step = torch.zeros(len(graph.ends), dtype=torch.bool), [], 0
while step < args.steps:
    order = torch.randperm(NODES, generator=torch.Generator().manual_seed(step))
    own_nodes = order[rank::world]
    if args.fault == "halves":
        own_nodes = order[order * world // NODES == rank]
    for seeds in own_nodes.split(args.batch_size)[: args.steps - step]:
        inputs, blocks, edges = graph.sample(seeds, rng)
        scores = model(inputs, graph.features[inputs], blocks)
        loss = F.cross_entropy(scores, graph.labels[seeds])
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if args.fault == "trace":
            seen = torch.cat(edges[:TRACED_HOPS])
            trace += zip(graph.sources[seen].tolist(), graph.ends[seen].tolist(), strict=True)
            coverage = len(set(trace)), len({source for source, _ in trace})
        else:
            visited[torch.cat(edges)] = True
        step += 1
if args.fault != "trace":
    coverage = int(visited.sum()), graph.sources[visited].unique().numel()
print(f"loss {loss.item():.3f}, rank {rank} saw {coverage[0]} edges of {coverage[1]} nodes")
dist.destroy_process_group()
