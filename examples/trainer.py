"""transformers.Trainer on a model that is larger than memory: TierzeroTrainer takes tiers=, the rest is as ever.

    python trainer.py --model ./Llama-3.2-1B --text notes.txt --nvme /mnt/nvme0/tz --host 16GiB --device 4GiB

Without --model a tiny Llama of random weights stands in, and bytes are its tokens.
Needs `pip install 'tierzero[trainer]'`.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainingArguments

import tierzero as tz
from tierzero.integrations.transformers import TierzeroTrainer


def load(folder: Path | None, text: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model in bfloat16, and the text as its tokens."""
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model, torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), torch.tensor(list(text.encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a tiny model")
    parser.add_argument("--text", type=Path, help="a text file; default: a module of Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"), help="checkpoints and the trained model")
    parser.add_argument("--nvme", type=Path, help="a directory on the drive; default: OUT/store")
    parser.add_argument("--host", default="64MiB", help="bytes of host memory that the engine may use")
    parser.add_argument("--device", default="2MiB", help="bytes of device memory for parameters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = (args.text or Path(sysconfig.get_path("stdlib"), "argparse.py")).read_text()
    model, tokens = load(args.model, text)
    rows = tokens[: len(tokens) // 64 * 64].view(-1, 64)
    trainer = TierzeroTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            save_steps=10,
            logging_steps=5,
            learning_rate=2e-5 if args.model else 3e-3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            report_to="none",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        tiers=tz.Tiers(nvme=args.nvme or args.out / "store", host=args.host, device=args.device),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.out / "model"))  # from_pretrained loads it
    tz.close(trainer.model)


if __name__ == "__main__":
    main()
