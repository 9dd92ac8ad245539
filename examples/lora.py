"""Train a LoRA adapter over a frozen model that is larger than the device (docs/models.md: larger than memory).

    python lora.py --model ./Llama-3.2-1B --text notes.txt --nvme /mnt/nvme0/tz --host 16GiB --device 4GiB

The base is read from the tiers and never written; optimizer states exist for the adapter alone. Without --model a tiny
Llama of random weights stands in, and bytes are its tokens.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import tierzero as tz


def load(folder: Path | None, text: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The base model in bfloat16, and the text as its tokens."""
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
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="where the adapter goes")
    parser.add_argument("--nvme", type=Path, help="a directory on the drive; default: OUT/store")
    parser.add_argument("--host", default="64MiB", help="bytes of host memory that the engine may use")
    parser.add_argument("--device", default="2MiB", help="bytes of device memory for parameters")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    text = (args.text or Path(sysconfig.get_path("stdlib"), "argparse.py")).read_text()
    base, tokens = load(args.model, text)
    # the adapter comes first: what offload() finds frozen gets no room for gradients and optimizer states
    model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))

    tz.offload(model, tz.Tiers(nvme=args.nvme or args.out / "store", host=args.host, device=args.device))  # 1
    opt = tz.AdamW(model.parameters(), lr=1e-3 if args.model else 1e-2)  # 2, frozen parameters are passed over

    for step in range(args.steps):
        starts = torch.randint(len(tokens) - 65, (4,)).tolist()
        batch = torch.stack([tokens[start : start + 65] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        tz.clip_grad_norm_(model.parameters(), 1.0)  # 3
        opt.step()
        opt.zero_grad()
        print(f"step {step + 1} of {args.steps}, loss {loss.item():.3f}")

    adapter = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}  # out of the tiers
    model.save_pretrained(args.out / "adapter", state_dict=adapter)  # 4, PeftModel.from_pretrained reads it
    tz.close(model)  # 5
    print(f"adapter in {args.out / 'adapter'}")


if __name__ == "__main__":
    main()
