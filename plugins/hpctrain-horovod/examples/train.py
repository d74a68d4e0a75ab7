"""Digits drawn with noise, classified by a small CNN: a training script as Horovod's users write them.

hpctrain horovodrun -np 2 python train.py
mpirun -n 2 python -m hpctrain_horovod train.py
"""

import argparse

import horovod.torch as hvd
import torch
from digits import Net, digits
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=48, help="over all ranks")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--double", action="store_true", help="compute in float64")


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    kind = torch.float64 if args.double else torch.float32
    train, test = digits(1920, seed=1), digits(480, seed=2)
    # the order of the samples must not depend on the number of ranks, so that the losses do not, either
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=args.batch_size // hvd.size(), sampler=sampler)

    model = Net().to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), dtype=torch.float64)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(kind)), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = hvd.allreduce(total / len(loader), name="mean_loss")
        mine = slice(hvd.rank(), None, hvd.size())
        with torch.no_grad():
            right = (model(test.tensors[0][mine].to(kind)).argmax(1) == test.tensors[1][mine]).sum()
        right = hvd.allreduce(right, name="right", op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.6f}, accuracy {right.item() / len(test):.4f}", flush=True)


if __name__ == "__main__":
    main()
