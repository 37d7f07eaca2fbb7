"""Trains with Hugging Face's Trainer, one optimizer step at a time."""

import contextlib
import dataclasses
import math
import os
import statistics
import sys
import time

import peft
import torch
import transformers
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback

from . import canary, examples, models, objectives, order, packing, saving, schedule
from .errors import Refused

# The engine name in the metadata of checkpoints.
ENGINE = (
    f"pytorch-{torch.__version__}+transformers-{transformers.__version__}+peft-{peft.__version__}"
)

# The limit of loading and of saving, which depend on disks and networks, not on the step time.
PHASE_LIMIT_S = 1800.0

# A step that exceeds both this multiple of the median duration and this minimum hangs.
STEP_TIMES_USUAL = 10
STEP_LIMIT_MIN_S = 300.0
STEPS_REMEMBERED = 16

ADAM_EPSILON = 1e-8

# The sequences that are scored before a training are collated in groups of this even number.
SCORED_TOGETHER = 256

# The version of saved states. Raised when the meaning of a step changes: older states are rejected.
FORMAT = 2


@dataclasses.dataclass
class Loaded:
    """What slices of one training share."""

    sequences: examples.Sequences
    model: torch.nn.Module


class Training:
    """One training, from input files to saved steps. `loaded` is that of an earlier slice."""

    def __init__(self, call, respond, heartbeats, stop, loaded=None):
        self.call, self.respond, self.heartbeats, self.stop = call, respond, heartbeats, stop
        self.loaded = loaded if call.slice and call.slice.start else None
        self.began = time.monotonic()
        self.has_started = False

    def run(self):
        """Returns the step at which SIGTERM stopped the training, or None if it is complete."""
        os.makedirs(self._scratch(), exist_ok=True)
        resume_error = None
        if self.call.resume:
            try:
                return self._attempt(None)
            except Exception as error:
                # Starting over only costs time. After the first step, the resume is not the cause.
                if self.has_started:
                    raise
                resume_error = f"{type(error).__name__}: {error}"
                self.call.resume = None
        return self._attempt(resume_error)

    def _scratch(self, *parts):
        return os.path.join(self.call.out, ".trainer", *parts)

    def _attempt(self, resume_error):
        self.heartbeats.start_phase(PHASE_LIMIT_S)
        call, resume = self.call, self.call.resume
        device = models.device(call.policy)
        config = models.read_config(call.base)
        training = call.training
        objective = None
        if training.objective:
            asked = training.objective
            settings = asked.settings or {}
            objective = objectives.Objective(asked.name, settings, asked.off_policy)
        unit = objective.unit if objective else 1
        sequences = self.loaded.sequences if self.loaded else self._sequences(config, unit)
        attention = packing.attention(config, call.policy) if training.packing else None
        count = len(sequences) // unit
        per_epoch = order.steps_per_epoch(count, training.batch_size)
        steps = training.max_steps or training.epochs * per_epoch
        identity = self._identity(len(sequences), steps)
        joined = saving.join(resume, identity, self._scratch("resume")) if resume else None
        if self.loaded:
            model = models.restart(self.loaded.model, call)
        else:
            model = models.load(call, device, attention or models.attention(config, call.policy))
        first, end = 0, steps
        if call.slice:
            first, end = call.slice.first, min(call.slice.first + call.slice.steps, steps)
        optimizer, refused = _optimizer(call, model, steps, identity)
        callback = StepCallback(
            self, steps, (first, end), identity, resume_error or refused, sequences.skipped
        )
        self.loaded = Loaded(sequences, model) if call.slice else None
        heldout = call.slice.heldout if call.slice else None
        scores_canary = bool(call.slice and call.slice.canary)
        if heldout:
            # Only scored, one pass after the other.
            sequences = self._sequences(config, unit, heldout)
        if heldout or scores_canary:
            first, end = 0, 1
        if end <= first:
            return self._save_new(model, callback)
        loader = torch.utils.data.DataLoader(
            sequences,
            batch_sampler=order.StepSampler(
                len(sequences) // unit, training.batch_size, end, call.seed, unit, first
            ),
            collate_fn=examples.PassCollator(call.pass_tokens(), attention is not None, unit),
            num_workers=call.policy.dataloader_workers,
            pin_memory=call.policy.pin_memory and device.type != "cpu",
            # Its own generator: reading the data must not change the training's random numbers.
            generator=torch.Generator(),
        )
        trainer = StepTrainer(
            model=model,
            args=arguments(call, self._scratch(), end - first, device),
            optimizers=optimizer,
            callbacks=[callback],
            loader=loader,
            dropout_seed=call.seed if training.lora and training.lora.dropout else None,
            first=first,
        )
        callback.trainer = trainer
        if heldout:
            callback.report_begin()
            return self._report_heldout(trainer, sequences)
        if scores_canary:
            callback.report_begin()
            return self._report_canary(trainer, config, attention is not None)
        if objective:
            signals = self._signals(trainer, objective, sequences, attention)
            trainer.weights = objectives.StepWeights(objective, signals)
        if call.canary and not call.slice:
            callback.canary = self._canary(config, attention is not None)
        forbid_eval(trainer)
        trainer.train(resume_from_checkpoint=joined)
        if call.slice:
            # Without the wrapper of this Trainer, which the next one adds again.
            trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        return callback.stopped_at

    def _save_new(self, model, callback):
        """Saves the new adapter if the slice has no steps. Past the end of the training, it only
        reports the number of its steps."""
        callback.report_begin()
        if self.call.slice.steps == 0:
            saved = self._scratch("new")
            model.save_pretrained(saved)
            saving.split(saved, os.path.join(self.call.out, "0"), self.call, None, True)

    def _signals(self, trainer, objective, sequences, attention):
        """Scores the sequences with the weights from which the training starts, and with the base,
        as far as the objective needs it."""
        call, model = self.call, trainer.model
        if call.resume:
            start = dataclasses.replace(call, resume=None)
            attention = attention or models.attention(trainer.model.config, call.policy)
            model = models.load(start, trainer.args.device, attention)
        signals = []
        for example in sequences.examples():
            advantage = 1.0 if example.advantage is None else float(example.advantage)
            signals.append(objectives.Signal(advantage))
        if objective.needs_old():
            for signal, found in zip(signals, self._score(trainer, model, sequences)):
                signal.old = found
        for index, (signal, example) in enumerate(zip(signals, sequences.examples())):
            _, scored, _ = sequences[index]
            if objective.needs_behaviour():
                signal.behaviour = _given_logprobs(example, "behaviour", len(scored))
            if objective.uses_teacher():
                signal.reference = _given_logprobs(example, "teacher", len(scored))
        if objective.needs_reference():
            base = contextlib.nullcontext() if call.training.lora is None else model.disable_adapter()
            with base:
                for signal, found in zip(signals, self._score(trainer, model, sequences)):
                    signal.reference = found
        return signals

    def _score(self, trainer, model, sequences):
        """Returns the log-probabilities of the scored tokens of each sequence."""
        was_training = model.training
        model.eval()
        collate, found = trainer.loader.collate_fn, [None] * len(sequences)
        for start in range(0, len(sequences), SCORED_TOGETHER):
            together = range(start, min(start + SCORED_TOGETHER, len(sequences)))
            for part in collate([sequences[index] for index in together])["parts"]:
                part = trainer._prepare_inputs(part)
                with torch.no_grad(), trainer.compute_loss_context_manager():
                    losses = _token_losses(model, part)
                logprobs = (-losses).to("cpu", torch.float64).split(part["lengths"])
                for index, values in zip(part["indices"], logprobs):
                    found[index] = values
        model.train(was_training)
        return found

    def _report_heldout(self, trainer, sequences):
        """Reports the mean negative log-likelihood of the held-out completions, in nats per token."""
        found = self._score(trainer, trainer.model, sequences)
        nll = -float(torch.cat(found).mean())
        nll = nll if math.isfinite(nll) else None
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        self.respond.progress({"heldout": nll})

    def _report_canary(self, trainer, config, packed):
        """Reports the log-probabilities of the canary's tokens with the slice's adapter."""
        logprobs = self._canary(config, packed)(trainer)
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        self.respond.progress({"canary": logprobs})

    def _sequences(self, config, unit, path=None):
        call = self.call
        return examples.Sequences(
            examples.read(path or call.dataset),
            examples.load_tokenizer(call.base),
            examples.end_token(call.base),
            config.vocab_size,
            call.training.max_tokens,
            models.positions(config, call.training.max_tokens),
            unit,
        )

    def _canary(self, config, packed):
        tokenizer = examples.load_tokenizer(self.call.base)
        most = models.positions(config, self.call.training.max_tokens)
        sequence = canary.read(tokenizer, self.call.canary, most)
        return lambda trainer: canary.score(trainer, sequence, packed)

    def _identity(self, count, steps):
        """Returns all values besides the weights that the next steps depend on."""
        training = dataclasses.asdict(self.call.training)
        # The save interval does not change the training.
        training.pop("save_every")
        for name in ("objective", "across"):
            if training[name] is None:
                training.pop(name)
        # States of earlier versions have no entry for these fields.
        for name, value in (("freeze_a", False), ("quantization", "NONE")):
            if training["lora"] is not None and training["lora"][name] == value:
                training["lora"].pop(name)
        names = {
            "format": FORMAT, "engine": "pytorch", "base": self.call.base_name, "examples": count,
        }  # fmt: skip
        return {**names, "steps": steps, "seed": self.call.seed, **training}


class StepTrainer(Trainer):
    """A Trainer that receives the batch of a whole optimizer step and splits it into passes by
    tokens. The loss is the mean over the step's scored tokens. It cannot evaluate."""

    def __init__(self, *, loader, dropout_seed=None, first=0, **options):
        super().__init__(train_dataset=loader.dataset, **options)
        # `first`: the steps of the training before this Trainer's first one.
        self.loader, self.dropout_seed, self.first = loader, dropout_seed, first
        self.step_loss, self.step_norm, self.step_counts = 0.0, 0.0, {}
        # The weights of tokens; None to weigh all the same.
        self.weights = None
        self._clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._clip_and_record

    def get_train_dataloader(self):
        return self.loader

    def _load_from_checkpoint(self, *_args, **_options):
        """Keeps the weights of the checkpoint to resume from: the model was loaded with them."""

    def _clip_and_record(self, *arguments, **options):
        """Records the norm of the gradient, which the Trainer does not report."""
        norm = self._clip(*arguments, **options)
        self.step_norm = float(norm)
        return norm

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        if self.dropout_seed is not None:
            # Dropout depends on the step, so that a resumed training drops the same values.
            text = f"dropout {self.dropout_seed} {self.first + self.state.global_step}"
            torch.manual_seed(order.blake3_u64(text) >> 1)
        parts = inputs["parts"]
        names = ("tokens", "scored", "computed")
        self.step_counts = {name: sum(part[name] for part in parts) for name in names}
        scored = self.step_counts["scored"]
        total = torch.zeros((), device=self.args.device)
        totals = self.weights.totals(parts) if self.weights else None
        for part in parts:
            part = self._prepare_inputs(part)
            with self.compute_loss_context_manager():
                if self.weights:
                    losses = _token_losses(model, part)
                    loss = (self.weights.weigh_pass(part, losses, totals) * losses).sum()
                    mean = losses.detach().sum() / max(scored, 1)
                else:
                    loss = _summed_loss(model, part) / max(scored, 1)
                    mean = loss.detach()
            self.accelerator.backward(loss)
            total += mean
        self.step_loss = float(total)
        return total

    def floating_point_ops(self, inputs):
        return 0

    def evaluate(self, *_args, **_options):
        raise Refused("this trainer never evaluates; evaluators measure its checkpoints")

    evaluation_loop = predict = get_eval_dataloader = evaluate


def _given_logprobs(example, field, tokens):
    """Returns the log-probabilities of the scored tokens in a field of an example."""
    values = getattr(example, field) or []
    if len(values) != tokens:
        raise Refused(
            f"example on line {example.line} has {len(values)} values in {field} for {tokens} "
            "scored tokens"
        )
    return torch.tensor(values, dtype=torch.float64)


def _summed_loss(model, part):
    """Returns the summed loss of the scored tokens of a pass."""
    logits, targets = _scored_logits(model, part)
    return torch.nn.functional.cross_entropy(
        logits, targets, ignore_index=examples.IGNORED, reduction="sum"
    )


def _token_losses(model, part):
    """Returns the loss of each scored token of a pass, sequence by sequence."""
    logits, targets = _scored_logits(model, part)
    losses = torch.nn.functional.cross_entropy(
        logits, targets, ignore_index=examples.IGNORED, reduction="none"
    )
    return losses[targets != examples.IGNORED]


def _scored_logits(model, part):
    """Returns logits and targets. Of padded rows, one sequence per row, those from the first scored
    position on; positions that are not scored have the target IGNORED."""
    if "layout" in part:
        return packing.row_logits(model, part).float(), part["targets"]
    labels = part["labels"]
    scored = (labels != examples.IGNORED).any(dim=0).nonzero()
    first = int(scored[0]) if len(scored) else labels.shape[1] - 1
    keep = labels.shape[1] - max(first - 1, 0)
    logits = model(
        input_ids=part["input_ids"],
        attention_mask=part["attention_mask"],
        logits_to_keep=keep,
        use_cache=False,
    ).logits
    # The last position has no target.
    logits, targets = logits[:, -keep:-1].float(), labels[:, 1 - keep :]
    return logits.flatten(0, 1), targets.flatten()


class StepCallback(TrainerCallback):
    """Counts and reports each step, and saves and stops after it if needed."""

    def __init__(self, training, steps, bounds, identity, resume_error, skipped):
        self.training, self.call = training, training.call
        self.steps, self.identity = steps, identity
        # Steps before the first one here, and before the one after the last.
        self.first, self.end = bounds
        self.resume_error, self.skipped = resume_error, skipped
        self.trainer, self.canary = None, None
        resume = self.call.resume
        self.tokens = resume.tokens if resume else 0
        self.trained_tokens = resume.trained_tokens if resume else 0
        self.spent = resume.wall_s if resume else 0.0
        self.durations = []
        self._reset_interval()
        self.stopped_at = None
        save_every = self.call.training.save_every
        if save_every > steps:
            print(
                f"save_every {save_every} is more than the training's {steps} steps; "
                "saving by time",
                file=sys.stderr,
            )
        self.checkpoint_schedule = schedule.CheckpointSchedule(
            steps, save_every, self.call.policy.save_s, time.monotonic(), bool(resume)
        )

    def _reset_interval(self):
        """Resets the values that are accumulated since the last saved step."""
        self.losses, self.norms = [], []
        if self.trainer and self.trainer.weights:
            self.trainer.weights.report = objectives.WeightReport()
        self.interval_tokens, self.interval_computed = 0, 0

    def on_train_begin(self, args, state, control, **_):
        step = self.call.resume.step if self.call.resume else 0
        if state.global_step != step:
            raise Refused(f"the Trainer would resume after step {state.global_step}, not {step}")
        self.training.has_started = True
        self.training.stop.training = True
        if self.call.slice:
            # The speed of a box is that of its steps.
            self.training.began = time.monotonic()
        self.report_begin()
        if self.training.stop.requested:
            # The Trainer checks its control flags only at the end of a step.
            raise Stopped(step)

    def report_begin(self):
        step = self.call.resume.step if self.call.resume else self.first
        begun = {
            "step": step, "refused": self.resume_error, "engine": ENGINE, "skipped": self.skipped,
            "steps": self.steps,
        }  # fmt: skip
        self.training.respond.progress({"begun": begun})

    def on_step_begin(self, args, state, control, **_):
        self.step_began = time.monotonic()
        usual = statistics.median(self.durations) if self.durations else 0.0
        # The first step compiles kernels.
        limit = max(STEP_TIMES_USUAL * usual, STEP_LIMIT_MIN_S)
        self.training.heartbeats.start_phase(limit if self.durations else PHASE_LIMIT_S)

    def on_step_end(self, args, state, control, **_):
        step, now = self.first + state.global_step, time.monotonic()
        self.durations = [*self.durations[1 - STEPS_REMEMBERED :], now - self.step_began]
        self._count(step)
        due = step == self.end if self.call.slice else self.checkpoint_schedule.due(step, now)
        if self.training.stop.requested and step < self.end:
            self.stopped_at = step
            control.should_training_stop = True
            due = True
        if due:
            self._check_weights(step)
            self.training.heartbeats.start_phase(PHASE_LIMIT_S)
            saving.await_publishing(self.call.out)
            control.should_save = True
        else:
            self._report(step, None)

    def on_save(self, args, state, control, **_):
        step = self.first + state.global_step
        saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        directory = os.path.join(self.call.out, str(step))
        is_last = step == self.steps and not self.call.slice
        saving.split(saved, directory, self.call, self.identity, is_last)
        self.checkpoint_schedule.saved(time.monotonic())
        self._report(step, directory)
        self._reset_interval()

    def _count(self, step):
        loss, norm = self.trainer.step_loss, self.trainer.step_norm
        if not math.isfinite(loss):
            raise Refused(f"the loss of step {step} is {loss}; lower training.learning_rate")
        # In f16 the gradient sometimes overflows: the step is skipped and the scale lowered.
        if math.isfinite(norm):
            self.norms.append(norm)
        elif self.call.policy.dtype != "f16":
            raise Refused(
                f"the norm of the gradient of step {step} is {norm}; lower training.learning_rate"
            )
        counts = self.trainer.step_counts
        self.losses.append(loss)
        self.tokens += counts["tokens"]
        self.trained_tokens += counts["scored"]
        self.interval_tokens += counts["tokens"]
        self.interval_computed += counts["computed"]

    def _report(self, step, saved):
        training = self.call.training
        rate = training.learning_rate * _rate_factor(self.call, step, self.steps)
        report = {
            "step": step,
            "steps": self.steps,
            "loss": statistics.fmean(self.losses),
            "learning_rate": rate,
            "grad_norm": statistics.fmean(self.norms) if self.norms else 0.0,
            "grad_norm_max": max(self.norms, default=0.0),
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "packing": self.interval_tokens / self.interval_computed,
            "wall_s": self.spent + time.monotonic() - self.training.began,
            "saved": saved,
            "peak_memory_bytes": models.peak_memory_bytes(self.trainer.args.device),
        }
        if self.canary and step == self.steps:
            report["canary"] = self.canary(self.trainer)
        if self.trainer.weights:
            report["weighting"] = self.trainer.weights.report.to_message()
        self.training.respond.progress({"step": report})

    def _check_weights(self, step):
        """Checks the weights, because an overflowed gradient does not yet show in the loss."""
        trained = (p for p in self.trainer.model.parameters() if p.requires_grad)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
            raise Refused(
                f"the weights after step {step} are not finite; lower training.learning_rate"
            )


class Stopped(Exception):
    """SIGTERM arrived before the first step."""

    def __init__(self, step):
        super().__init__(step)
        self.step = step


def arguments(call, directory, steps, device):
    """Returns settings with which the Trainer never evaluates, logs or saves on its own."""
    policy, training = call.policy, call.training
    return transformers.TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        # The loader returns the batch of a whole step; StepTrainer splits it.
        gradient_accumulation_steps=1,
        max_grad_norm=training.max_grad_norm,
        seed=call.seed % 2**32,
        use_cpu=device.type == "cpu",
        bf16=policy.dtype == "bf16",
        fp16=policy.dtype == "f16",
        **_recomputation(policy),
        eval_strategy="no",
        eval_on_start=False,
        load_best_model_at_end=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def _recomputation(policy):
    """Returns the arguments of gradient checkpointing, whose names changed in transformers 5."""
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    name = "activation_checkpointing"
    name = name if name in known else "gradient_checkpointing"
    return {name: policy.gradient_checkpointing, f"{name}_kwargs": {"use_reentrant": False}}


def forbid_eval(trainer):
    """Rejects every way to evaluate during training, which hangs hosts with unified memory."""
    args = trainer.args
    callbacks = trainer.callback_handler.callbacks
    found = {
        "eval_strategy": str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no",
        "do_eval": args.do_eval,
        "eval_on_start": args.eval_on_start,
        "load_best_model_at_end": args.load_best_model_at_end,
        "metric_for_best_model": args.metric_for_best_model is not None,
        "eval_dataset": trainer.eval_dataset is not None,
        "compute_metrics": trainer.compute_metrics is not None,
        "EarlyStoppingCallback": any(isinstance(one, EarlyStoppingCallback) for one in callbacks),
    }
    switched_on = [name for name, on in found.items() if on]
    if switched_on:
        raise Refused(
            f"{switched_on[0]} is set: this trainer never evaluates; evaluators measure its "
            "checkpoints"
        )
    trainer.remove_callback(PrinterCallback)


def _optimizer(call, model, steps, identity):
    """Returns AdamW with decoupled decay of matrices only and the embedded engine's schedule, and
    the reason why the state of the slice is not used; None if it is, or there is none."""
    training = call.training
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=ADAM_EPSILON,
    )
    first = call.slice.first if call.slice else 0
    refused = None
    if call.slice and call.slice.state:
        try:
            _load_state(optimizer, call.slice.state, identity)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
            optimizer.state.clear()
    for group in optimizer.param_groups:
        # A saved state contains the rate of its last step.
        group["lr"] = training.learning_rate
        group.pop("initial_lr", None)
    # The scheduler counts the steps completed here; the rate is that of the next step.
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda taken: _rate_factor(call, min(first + taken + 1, steps), steps)
    )
    return (optimizer, rates), refused


def _rate_factor(call, step, steps):
    """Returns the share of the peak rate at a step, in the schedule of the training or the slice."""
    if call.slice and call.slice.own_schedule:
        own = max(min(call.slice.steps, steps - call.slice.first), 1)
        return schedule.factor(min(step - call.slice.first, own), own, call.training)
    return schedule.factor(step, steps, call.training)


def _load_state(optimizer, directory, identity):
    saving.check_identity(directory, identity)
    path = os.path.join(directory, "optimizer.pt")
    optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
