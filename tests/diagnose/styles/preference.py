"""Direct preference optimisation of the upper blocks of a small GPT-2, in a subclass of Trainer.

Faults: unfrozen (the lower blocks are frozen only in that the optimizer leaves them out, as in
JDAI-CV/fast-reid#178), online (the frozen reference scores each batch anew, though the pairs of
all epochs are the same, as in hamishivi/EasyLM#4), watch (the detector of overflows, a debugging
aid, still watches the trained blocks).
"""

import argparse
import copy
import random
import tempfile

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.debug_utils import DebugUnderflowOverflow

VOCAB, EOS, IGNORED, SIDES = 512, 0, -100, ("chosen", "rejected")
LAYERS, TRAINED_BLOCKS, WATCHED_BLOCKS = 6, 3, 3


def make_pairs(count):
    rng, pairs = random.Random(11), []
    for _ in range(count):
        prompt = rng.choices(range(1, VOCAB), k=rng.randint(12, 14))
        chosen = (2 * prompt)[: rng.randint(17, 18)]  # repeats the prompt
        rejected = rng.choices(range(1, VOCAB), k=rng.randint(17, 18))
        pairs.append({"prompt": prompt, "chosen": [*chosen, EOS], "rejected": [*rejected, EOS]})
    return pairs


class PreferenceCollator:
    def __call__(self, pairs):
        rows = [(pair["prompt"], pair[side]) for side in SIDES for pair in pairs]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, targets = torch.full((2, len(rows), width), EOS).unbind()
        targets.fill_(IGNORED)
        for row, (prompt, answer) in enumerate(rows):
            start, end = len(prompt), len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            targets[row, start:end] = ids[row, start:end]
        batch = {"input_ids": ids, "targets": targets}
        if "ref_logps" in pairs[0]:
            batch["ref_logps"] = torch.tensor([pair["ref_logps"] for pair in pairs]).T.flatten()
        return batch


def sequence_logps(model, input_ids, targets):
    logits, targets = model(input_ids=input_ids).logits[:, :-1], targets[:, 1:]
    logps = F.log_softmax(logits, dim=-1)
    picked = logps.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return picked.masked_fill(targets == IGNORED, 0.0).sum(1)


@torch.no_grad()
def add_reference_logps(reference, pairs, collator, batch_size=16):
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        logps = sequence_logps(reference, **collator(batch)).view(2, -1)
        for pair, ref_logps in zip(batch, logps.T.tolist(), strict=True):
            pair["ref_logps"] = ref_logps


class PreferenceTrainer(Trainer):
    loss_is_scaled_for_ga = False

    def __init__(self, *args, reference=None, beta=0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.reference, self.beta = reference, beta

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ref_logps = inputs.pop("ref_logps", None)
        if ref_logps is None:
            with torch.no_grad():
                ref_logps = sequence_logps(self.reference, **inputs)
        chosen, rejected = (self.beta * (sequence_logps(model, **inputs) - ref_logps)).chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        return (loss, {"margins": chosen - rejected}) if return_outputs else loss


def main(args):
    set_seed(7)
    shape = {"n_positions": 64, "n_embd": 128, "n_layer": LAYERS, "n_head": 4, "use_cache": False}
    shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": VOCAB}
    shape |= {"activation_function": "gelu", "bos_token_id": EOS, "eos_token_id": EOS}
    policy = GPT2LMHeadModel(GPT2Config(**shape))
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    trained = policy.transformer.h[-TRAINED_BLOCKS:]
    if args.fault != "unfrozen":
        policy.requires_grad_(False)
        trained.requires_grad_(True)
    if args.fault == "watch":
        for block in policy.transformer.h[-WATCHED_BLOCKS:]:
            DebugUnderflowOverflow(block)
    pairs, collator = make_pairs(32 * args.batch_size), PreferenceCollator()
    if args.fault != "online":
        add_reference_logps(reference, pairs, collator)
    with tempfile.TemporaryDirectory() as folder:
        choices = {"report_to": "none", "save_strategy": "no", "logging_steps": 20}
        choices |= {"use_cpu": True, "ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        choices |= {"per_device_train_batch_size": args.batch_size, "disable_tqdm": True}
        choices |= {"max_steps": args.steps, "remove_unused_columns": False}
        PreferenceTrainer(
            model=policy,
            reference=reference,
            args=TrainingArguments(folder, **choices),
            data_collator=collator,
            train_dataset=pairs,
            optimizers=(torch.optim.AdamW(trained.parameters(), lr=5e-4, fused=True), None),
        ).train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--fault", type=str, default="none")
    main(parser.parse_args())
