"""Train the small Llama beside this file on the text that ships with CPython, and measure it on text it never saw.

    python examples/target_model/train.py            # about a quarter of an hour on two cores

Needs torch, transformers and tokenizers. The model directory is rewritten at every evaluation, so an interrupted run
leaves a usable model whose figures are those in its `training.json`.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import corpus
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the 256 bytes are in the vocabulary, so any text encodes and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(vocab_size: int) -> LlamaForCausalLM:
    """Every dimension that tensor parallelism cuts is even, and the whole stays under 4 MB in bfloat16."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """All documents in one row of ids, each preceded by the end-of-text token."""
    ids = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for document in ids for token in [tokenizer.eos_token_id, *document]])


@torch.inference_mode()
def evaluate(
    model_dir: Path, tokenizer: PreTrainedTokenizerFast, held_out: torch.Tensor, train: torch.Tensor, window: int
) -> dict:
    """Figures of the *saved* bfloat16 weights, computed in float32, over consecutive windows that share no context."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).float().eval()
    counts = torch.bincount(train, minlength=len(tokenizer)).double() + 1
    unigram = (counts / counts.sum()).log()
    # One character of a byte-level token is one byte; the end-of-text token stands for none.
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    num_bytes = torch.tensor([0 if piece == END else len(piece) for piece in pieces])
    nats = unigram_nats = correct = tokens = text_bytes = 0
    for ids in held_out.split(window + 1):
        if len(ids) > 1:
            logits, target = model(ids[None, :-1]).logits[0], ids[1:]
            nats += F.cross_entropy(logits, target, reduction="sum").item()
            unigram_nats -= unigram[target].sum().item()
            correct += (logits.argmax(-1) == target).sum().item()
            text_bytes += num_bytes[target].sum().item()
            tokens += len(target)
    return {
        "held_out_tokens": tokens,
        "held_out_bytes": text_bytes,
        "loss_nats_per_token": round(nats / tokens, 4),
        "bits_per_byte": round(nats / math.log(2) / text_bytes, 4),
        "top1_accuracy": round(correct / tokens, 4),
        "unigram_nats_per_token": round(unigram_nats / tokens, 4),
        "unigram_bits_per_byte": round(unigram_nats / math.log(2) / text_bytes, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch", type=int, default=4, help="windows a step")
    parser.add_argument("--window", type=int, default=1024, help="tokens a window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--eval-every", type=int, default=450, help="steps between evaluations, each of which saves")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    documents = corpus.training_documents()
    tokenizer = make_tokenizer(documents, args.vocab)
    train, held_out = token_stream(tokenizer, documents), token_stream(tokenizer, corpus.held_out_documents())
    model = make_model(len(tokenizer)).train()
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters; {len(train):,} training and {len(held_out):,} held-out tokens", flush=True)

    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
    )

    seconds = 0.0  # of training alone
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        starts = torch.randint(len(train) - args.window, (args.batch, 1))
        batch = train[starts + torch.arange(args.window + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seconds += time.perf_counter() - started

        tokens_seen = step * args.batch * args.window
        if step % 20 == 0:
            speed = f"{tokens_seen / seconds:,.0f} tokens/s  {seconds:.0f} s"
            print(f"step {step}/{args.steps}  loss {loss.item():.3f}  {speed}", flush=True)
        if step % args.eval_every == 0 or step == args.steps:
            save(model, tokenizer, args.out)
            figures = {
                "parameters": num_parameters,
                "training_tokens": len(train),
                "tokens_seen": tokens_seen,
                "steps": f"{step} of {args.steps}",
                "window": args.window,
                "seconds": round(seconds),
                **evaluate(args.out, tokenizer, held_out, train, args.window),
                "python": sys.version.split()[0],
                "torch": torch.__version__,
            }
            (args.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
            print(json.dumps(figures), flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(do_sample=False, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    copy.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
