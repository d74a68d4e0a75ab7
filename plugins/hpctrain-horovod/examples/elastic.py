"""The digits of train.py, by workers that may be lost or come later.

hpctrain horovodrun -np 4 --min-np 2 python elastic.py
"""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from train import Net, digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=48, help="over all workers")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--batches-per-commit", type=int, default=5)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
data = digits(1920, seed=1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.epoch < args.epochs:
        while state.sampler.remaining_indices:
            mine = args.batch_size // hvd.size()
            indices = list(state.sampler)[:mine]
            images, labels = data.tensors[0][indices], data.tensors[1][indices]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            state.losses.append(hvd.allreduce(loss.detach(), name="loss").item())
            state.sampler.record_batch(state.batch, mine)
            state.sampler.reset()
            state.samples += mine * hvd.size()
            state.batch += 1
            if state.batch % args.batches_per_commit == 0:
                if hvd.rank() == 0:
                    print(f"batch {state.batch}: loss {state.losses[-1]:.4f} on {hvd.size()} workers", flush=True)
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    last = sum(state.losses[-10:]) / 10
    if hvd.rank() == 0:
        print(f"done: {state.samples} samples, loss {last:.4f} on {hvd.size()} workers", flush=True)


sampler = hvd.elastic.ElasticSampler(data)
train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, samples=0, losses=[]))
