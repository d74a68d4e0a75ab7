# The tasks, for run.sh. Each begins in a copy of a run of 20 steps: job.toml, my.py, runs/first, and `out`, what it printed.

newest=runs/first/checkpoints/latest

exits() { # exits CODE COMMAND...: it ends with that code and without a traceback; `said` has what it printed
    local code=0 expected=$1
    shift
    "$@" >said 2>&1 || code=$?
    cat said
    [ $code = "$expected" ] && ! grep -q Traceback said
}

add() { cat >>job.toml; } # tables to the end of the job, from stdin

anew() { hpctrain run job.toml --resume never "$@"; }

row() { python -c "import json, sys; rows = [json.loads(line) for line in open('runs/first/metrics.jsonl')]; assert $1, rows[-1]"; }

# ---- the command

task_help() {
    hpctrain --help | grep "hpctrain COMMAND --help\|evaluate"
    hpctrain run --help | grep -- --resume
    hpctrain --version | grep 0.1
}

task_new() {
    hpctrain new fresh.toml
    hpctrain check fresh.toml -n 2
    hpctrain new --template module module.toml; hpctrain new --template finetune finetune.toml
    exits 2 hpctrain new fresh.toml; grep -q "exists already" said
}

task_check_a_typo() {
    sed -i 's/^steps/stepz/' job.toml
    exits 2 hpctrain check job.toml
    grep -q "job.toml:3.*stepz.*steps" said
}

task_check_three_mistakes() {
    sed -i 's/micro_size = 6/micro_size = 7/; s/lr = 0.01/lr = "fast"/; s/^steps = 20/steps = -1/' job.toml
    exits 2 hpctrain check job.toml -n 2
    grep -q "steps" said; grep -q "lr" said; grep -q "micro_size 7" said
}

task_check_a_wrong_callable() {
    exits 2 hpctrain check job.toml --set model.name=my:buidl; grep -q "buidl" said
    exits 2 hpctrain check job.toml --set model.name=mine:build; grep -q "mine" said
    exits 2 hpctrain check job.toml --set model.widht=3; grep -q "widht" said
}

task_no_such_file() { exits 2 hpctrain run jobs.toml; grep -q "jobs.toml" said; }

task_run() {
    rm -r runs; hpctrain run job.toml | grep "step 20/20"
    test -f runs/first/metrics.jsonl -a -f runs/first/job.resolved.toml -a -d runs/first/checkpoints/step-00000020
}

task_run_on_two_ranks() { grep -q "ranks  *2 (mpi)" out; grep -q "step 20/20" out; }

task_run_again_and_longer() {
    exits 0 hpctrain run job.toml; grep -q "20" said
    hpctrain run job.toml --set job.steps=30 | grep "step 30/30"
    row "len([r for r in rows if 'loss' in r]) == 30"
}

task_resume_never() { anew; test -d runs/first -a -d runs/first.1; }

task_set() {
    anew --set optimizer.lr=0.02 --set 'optimizer.name=sgd'; row "rows[0]['lr'] == 0.02"
    exits 2 hpctrain run job.toml --set optimizer.l=1; grep -q "optimizer" said
    exits 2 hpctrain run job.toml --set job.epochs=3; grep -q "both" said; grep -q -- "--set job.steps=" said
}

task_another_job_in_the_same_directory() {
    exits 2 hpctrain run job.toml --set job.seed=9
    grep -q -- "--resume never\|output_dir" said
}

task_plugins() {
    hpctrain plugins | grep adamw
    hpctrain plugins show optimizer adamw | grep weight_decay
    exits 2 hpctrain plugins show optimizer adamv; grep -q "adamw" said
}

task_schema() { hpctrain schema | python -c "import json, sys; assert 'optimizer' in json.load(sys.stdin)['properties']"; }

task_metrics() {
    row "[r['evaluation_accuracy'] for r in rows if 'evaluation_accuracy' in r][-1] > 0.34"
    row "[r['step'] for r in rows if 'loss' in r] == list(range(1, 21))"
}

task_no_torch_needed_for_a_wrong_rank_number() { exits 2 hpctrain run job.toml -n 7; grep -q "24\|divide" said; }

# ---- data

task_augmentation() {
    anew --set dataset.name=my:Noisy -n 2
    mv runs/first/metrics.jsonl two
    anew --set dataset.name=my:Noisy
    python -c "
import json
one, two = ([json.loads(line) for line in open(name)] for name in ('runs/first/metrics.jsonl', 'two'))
assert all(abs(a['loss'] - b['loss']) < 1e-5 for a, b in zip(one, two) if 'loss' in a)"
}

task_workers() { anew --set dataset.workers=2 | grep "step 20/20"; }

task_collate() { anew --set dataset.collate=my:collate | grep "step 20/20"; }

task_weights() { anew --set dataset.weights=my:weights | grep "step 20/20"; }

task_stream() { anew --set dataset.name=my:Stream -n 2 | grep "step 20/20"; }

task_a_dataloader() {
    echo 'def loader(split): return torch.utils.data.DataLoader(Data(split), batch_size=5, collate_fn=collate)' >>my.py
    anew --set dataset.name=my:loader | grep "step 20/20"
}

task_an_error_in_my_data() {
    sed -i 's/return self.x\[index\], self.y/return self.z[index], self.y/' my.py
    exits 4 hpctrain run job.toml --resume never; grep -q "my.py" said; grep -q "dataset" said; grep -q "'z'" said
}

# ---- training

task_loss_of_several() { anew --set model.loss=my:losses; row "'loss_class' in rows[0] and 'evaluation_loss_small' in rows[-1]"; }

task_own_metric() {
    printf '[[metric]]\nname = "my:error_rate"\n' | add
    anew -n 2; row "abs(rows[-1]['evaluation_error_rate'] + rows[-1]['evaluation_accuracy'] - 1) < 1e-6"
}

task_torchmetrics() {
    printf '[[metric]]\nname = "torchmetrics.classification:MulticlassF1Score"\nnum_classes = 3\n' | add
    anew -n 2; row "any('F1' in k or 'f1' in k for k in rows[-1])"
}

task_early_stopping() {
    printf '[[hook]]\nname = "early-stopping"\npatience = 1\nminimum_change = 10\n' | add
    anew --set evaluation.every_steps=2 | grep "ended"; row "rows[-1]['step'] < 20"
}

task_ema() {
    printf '[[hook]]\nname = "ema"\ndecay = 0.9\n' | add
    anew
    hpctrain evaluate job.toml --checkpoint $newest --weights-of ema --json >found
    python -c "
import json
row = json.loads(open('runs/first/metrics.jsonl').readlines()[-1])
assert abs(json.load(open('found'))['loss'] - row['evaluation_loss']) < 1e-6"
    exits 2 hpctrain evaluate job.toml --checkpoint $newest --weights-of swa; grep -q "ema" said
}

task_learning_rate_finder() {
    printf 'extends = "job.toml"\n[job]\nname = "find-lr"\n[guard]\nnon_finite = "skip"\n[[hook]]\nname = "lr-finder"\nsteps = 20\n' >find.toml
    hpctrain run find.toml --set job.steps=50 | grep "lr"
}

task_keep_best() {
    printf 'keep_best = { count = 1, metric = "accuracy", mode = "max" }\n' | add
    anew --set evaluation.every_steps=5 --set checkpoint.every_steps=5; [ "$(ls -d runs/first/checkpoints/step-* | wc -l)" -le 2 ]
}

task_csv() { printf '[[logger]]\nname = "csv"\n' | add; anew; [ "$(wc -l <runs/first/metrics.csv)" = 21 ]; }

task_tensorboard() { printf '[[logger]]\nname = "tensorboard"\n' | add; anew; ls runs/first/events | grep tfevents; }

task_own_schedule() {
    printf '[schedule]\nname = "my:wave"\nperiod = 5\n' | add
    anew; row "len({r['lr'] for r in rows if 'lr' in r}) > 2"
}

task_scheduler_of_torch() {
    printf '[schedule]\nname = "torch.optim.lr_scheduler:ExponentialLR"\ngamma = 0.5\n' | add
    anew; row "abs(rows[1]['lr'] / rows[0]['lr'] - 0.5) < 1e-6"
}

task_own_optimizer() { anew -n 2 --set optimizer.name=my:SignSGD | grep "step 20/20"; }

task_optimizer_of_torch() { anew --set optimizer.name=torch.optim:Adagrad | grep "step 20/20"; }

task_sharding() { anew -n 2 --set sharding.stage=3 | grep "zero-3"; }

# ---- weights and checkpoints

task_nested_weights() {
    python -c "
import my, torch
torch.save({'epoch': 3, 'state_dict': {'module.' + k: v for k, v in my.build().state_dict().items()}}, 'old.pt')"
    anew --set model.weights=old.pt | grep "module\."
}

task_other_head() {
    python -c "import my, torch; m = my.build(); m[2] = torch.nn.Linear(16, 7); torch.save(m.state_dict(), 'other.pt')"
    exits 5 hpctrain run job.toml --resume never --set model.weights=other.pt
    grep -q "2.weight" said; grep -q "weights_strict" said
    anew --set model.weights=other.pt --set model.weights_strict=false | grep "2.weight"
}

task_export() {
    hpctrain checkpoint export $newest --to safetensors my.safetensors
    python -c "from safetensors.torch import load_file; assert '0.weight' in load_file('my.safetensors')"
    hpctrain checkpoint export $newest --to torch my.pt
    python -c "import my, torch; my.build().load_state_dict(torch.load('my.pt'))"
    exits 2 hpctrain checkpoint export $newest --to huggingface hf
}

task_look_at_checkpoints() {
    hpctrain checkpoint list runs/first | grep step-00000020
    hpctrain checkpoint show $newest | grep "0.weight"
    hpctrain checkpoint verify $newest
    exits 1 hpctrain checkpoint diff runs/first/checkpoints/step-00000010 $newest; grep -q "0.weight" said
}

task_a_damaged_checkpoint() {
    file=$(ls runs/first/checkpoints/step-00000020/shard-*.h5 | head -1)
    printf 'damage' | dd of="$file" bs=1 seek=3000 conv=notrunc
    exits 5 hpctrain checkpoint verify runs/first/checkpoints/step-00000020; grep -q "$(basename "$file")" said
    exits 0 hpctrain run job.toml; grep -q "step-00000010" said
}

task_evaluate() {
    hpctrain evaluate job.toml --checkpoint $newest -n 2 --json >found
    python -c "import json; assert json.load(open('found'))['accuracy'] == json.loads(open('runs/first/metrics.jsonl').readlines()[-1])['evaluation_accuracy']"
}

task_predict() {
    hpctrain predict job.toml --checkpoint $newest --out out.npy
    python -c "import numpy; assert numpy.load('out.npy').shape == (60, 3)"
}

task_python() {
    cat >program.py <<'END'
import hpctrain, my, torch
result = hpctrain.run({
    "job": {"name": "objects", "steps": 5},
    "model": {"name": my.build, "loss": torch.nn.functional.cross_entropy},
    "dataset": {"name": {"train": my.Data("train"), "validation": my.Data("validation")}},
    "optimizer": {"name": torch.optim.AdamW, "lr": 0.01},
    "batch": {"global_size": 24, "micro_size": 6},
})
module = hpctrain.load(result["checkpoint"])
print(result["step"], module(torch.ones(1, 4)).shape)
END
    python program.py | grep "5 torch.Size(\[1, 3\])"
}

task_load() { python -c "import hpctrain, torch; print(hpctrain.load('$newest')(torch.ones(2, 4)))" | grep tensor; }

# ---- stopping, and scripts of one's own

task_stop_and_continue() {
    rm -r runs
    hpctrain run job.toml --set dataset.slow=0.01 >said 2>&1 &
    pid=$!
    for _ in $(seq 600); do [ -s runs/first/metrics.jsonl ] && break || sleep 0.1; done
    kill -TERM $pid
    code=0 && wait $pid || code=$?
    cat said
    [ $code = 75 ]
    grep -q "continue" said
    hpctrain run job.toml --set dataset.slow=0.01 | grep "step 20/20"
    row "[r['step'] for r in rows if 'loss' in r] == list(range(1, 21))"
}

task_a_ddp_script() {
    cat >ddp.py <<'END'
import os
import torch, torch.distributed as dist
import hpctrain.mpi, my
dist.init_process_group("mpi4py", init_method="mpi://")
model = torch.nn.parallel.DistributedDataParallel(my.build())
data = my.Data("train")
loader = torch.utils.data.DataLoader(data, 8, sampler=torch.utils.data.DistributedSampler(data))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {os.environ['LOCAL_RANK']}", flush=True)
dist.destroy_process_group()
END
    mpiexec -n 2 python ddp.py | tee said
    grep -q "rank 0 of 2, local rank 0" said; grep -q "rank 1 of 2, local rank 1" said
}

task_local_rank() { anew -n 2 --set dataset.name=my:says_its_rank | grep "local rank 1 of 2"; }
