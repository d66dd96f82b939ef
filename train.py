"""
Train one character GPT, or a sweep of them. The dial is model.n_kv: 8 = multi-head, 2 = grouped-query, 1 = multi-query.

    python train.py model.n_kv=2 seed=1                         one run, 10-15 minutes on 2 cores
    python train.py preset=smoke model.n_kv=2                   seconds: a model too small to learn much
    python train.py -m model.n_kv=8,2,1 seed=1,2,3              the sweep: nine runs, one after the other
    python train.py data.source=my.txt sweep=mine               any other UTF-8 text
    python train.py preset=recall model.n_kv=2                  keys that ask for their values, up to 1,000 tokens later

Prints progress with loss, tokens/s and ETA, then the final and best validation loss (nats per character, whole split;
of data=recall nats per answer).
A run owns runs/<sweep>/<name>/. The same command again skips a finished run and resumes an interrupted one.
"""

from dataclasses import asdict, dataclass, replace

from cli import script
from model import GPT, GPTConfig
from storage import open_run
from stream import DataConfig, load_data
from tracking import WandbConfig
from training import TrainConfig, set_up_device, train


@dataclass(frozen=True)
class Settings:
    """configs/train.yaml, where each key has its reason."""

    model: GPTConfig
    data: DataConfig
    train: TrainConfig
    wandb: WandbConfig
    sweep: str
    name: str
    seed: int
    device: str
    threads: int | None


@script("train", Settings)
def main(cfg):
    device = set_up_device(cfg.device, cfg.threads)
    data = load_data(cfg.data.name, cfg.data.source, cfg.model.block_size)
    model_config = replace(cfg.model, vocab_size=data.meta["vocab_size"])
    config = {
        "script": "train",
        "sweep": cfg.sweep,
        "name": cfg.name,
        "seed": cfg.seed,
        "model": asdict(model_config),
        "train": asdict(cfg.train),
        "data": data.identity,
    }
    folder, state = open_run(config)
    if state == "finished":
        print(f"{cfg.name}: finished before, skipped ({folder})")
        return
    model = GPT(model_config, seed=cfg.seed)
    summary = train(model, data, cfg.train, config, folder, device=device, wandb=cfg.wandb, job_type="train")
    print(
        f"{cfg.name}: val loss {summary['val_loss_final']:.4f} (best {summary['val_loss_best']:.4f}) "
        f"after {summary['steps']} steps, {summary['elapsed_s'] / 60:.1f} min -> {folder}",
        flush=True,
    )


if __name__ == "__main__":
    main()
