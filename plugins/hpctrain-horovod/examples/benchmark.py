"""Images per second of a model on made data, as Horovod's synthetic benchmark prints them.

hpctrain horovodrun -np 2 python benchmark.py
"""

import argparse
import timeit
from itertools import pairwise

import horovod.torch as hvd
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-iters", type=int, default=5)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
channels = [3, 16, 32, 64]
layers = [
    layer
    for before, after in pairwise(channels)
    for layer in (nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU())
]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if args.use_adasum else 0.01 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum if args.use_adasum else hvd.Average
)
data, target = torch.randn(args.batch_size, 3, 64, 64), torch.randint(0, 100, (args.batch_size,))


def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data), target).backward()
    optimizer.step()


timeit.timeit(step, number=2)
rates = []
for number in range(args.num_iters):
    seconds = timeit.timeit(step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
    if hvd.rank() == 0:
        print(f"Iter #{number}: {rates[-1]:.1f} img/sec per rank")
if hvd.rank() == 0:
    mean = sum(rates) / len(rates)
    print(f"Img/sec per rank: {mean:.1f}\nTotal img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f}")
