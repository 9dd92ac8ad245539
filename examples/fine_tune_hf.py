"""Fine-tune a Hugging Face language model, its weights and optimizer states on NVMe.

    python fine_tune_hf.py --model ./Llama-3.2-1B --text notes.txt --nvme /mnt/nvme0/tz --host 16GiB --device 4GiB

Without --model a tiny Llama of random weights stands in, and bytes are its tokens; without --text, a Python module.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

import tierzero as tz


def describe(folder: Path | None, text: str) -> tuple[PretrainedConfig, torch.Tensor]:
    """The model's configuration, and the text as its tokens."""
    if folder is not None:
        tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        return AutoConfig.from_pretrained(folder), torch.tensor(tokens)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    return config, torch.tensor(list(text.encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a tiny model")
    parser.add_argument("--text", type=Path, help="a text file; default: a module of Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/fine-tune"), help="where the trained model goes")
    parser.add_argument("--nvme", type=Path, help="a directory on the drive; default: OUT/store")
    parser.add_argument("--host", default="64MiB", help="bytes of host memory that the engine may use")
    parser.add_argument("--device", default="2MiB", help="bytes of device memory for parameters")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = (args.text or Path(sysconfig.get_path("stdlib"), "argparse.py")).read_text()
    config, tokens = describe(args.model, text)
    with tz.parameters_on_meta():  # it is never whole in memory; a model of from_pretrained works as well
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()

    tz.offload(model, tz.Tiers(nvme=args.nvme or args.out / "store", host=args.host, device=args.device))  # 1
    if args.model:
        tz.load(model, args.model)  # one tensor at a time
    else:
        tz.initialize(model, init=model._init_weights)
    opt = tz.AdamW(model.parameters(), lr=2e-5 if args.model else 3e-3, weight_decay=0.1)  # 2
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)

    model.train()
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            starts = torch.randint(len(tokens) - 65, (4,)).tolist()
            batch = torch.stack([tokens[start : start + 65] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss / args.accumulate
            loss.backward()
            total += loss.item()
        tz.clip_grad_norm_(model.parameters(), 1.0)  # 3
        opt.step()
        schedule.step()
        opt.zero_grad()
        print(f"step {step + 1} of {args.steps}, loss {total:.3f}")

    tz.export(model, args.out / "export")  # 4, from_pretrained loads it
    model.config.save_pretrained(args.out / "export")
    if args.model:  # a pipeline wants it beside the weights
        AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out / "export")
    tz.close(model)  # 5
    print(f"trained model in {args.out / 'export'}")


if __name__ == "__main__":
    main()
