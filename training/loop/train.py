"""The training of a run: from the opened data and devices to the trained model in its directory.

`run_training` locks the run directory, builds the model and saves it once it is trained; `Training.run_steps` is the
loop over the steps. Both read from top to bottom. What a step computes is in `trainer.py`.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError, preprocessing_of
from keras_vit.checkpoints.describe import license_of
from keras_vit.files.atomic import locked
from keras_vit.run import CHECKPOINTS, Run
from training.data.pipeline import evaluation_batches, resized_once, training_batches
from training.data.sources import bad_examples_reported
from training.data.unlabelled import semi_supervised_batches
from training.loop import checkpoints
from training.loop.build import build_trainer, trained_model
from training.loop.callbacks import (
    InspectEpochs,
    MetricsLog,
    ProfileSteps,
    StopSignals,
    TrainingInterrupted,
    TrainingProgress,
    save_images,
    write_curves,
)
from training.loop.devices.data_service import served_batches
from training.loop.devices.strategies import check_equal_on_workers, distributed, report_lost_workers
from training.loop.dry_run import dry_run_report
from training.loop.optimizers import LearningRate
from training.loop.plan import Plan, Setup, print_summary, resolve
from training.loop.trainer import Trainer
from training.options.common import TrainingOptions

# Evaluation computes no gradients, so its batches may be larger than those of training.
_EVALUATION_BATCH = 500


def run_training(
    options: TrainingOptions,
    setup: Setup,
    make_model: Callable[[int], keras.Model],
    *,
    command: str,
    recipe_name: str,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    checkpoint: str | None = None,
) -> Run:
    """Train, or resume, or do nothing if the run is finished; return the run. With `options.dry_run`, only report.

    Args:
        make_model: number of classes -> model; called once, under the strategy, before any file is written.
        command: for config.json, as is recipe_name.
        callbacks: see one training of all epochs, each of which ends with an evaluation. Their `model` is the trainer;
            its `stop_training` ends the run and saves the model as it is. When an interrupted run continues, they start
            fresh. With several workers, those of each worker must make the same decisions.
        checkpoint: that the model begins with, for config.json.

    Raises:
        TrainingInterrupted: after SIGTERM or Ctrl-C, with a checkpoint saved.
        UserError: if options, data, devices and directory do not fit, the loss is not finite or the disk is full; the
            last checkpoint remains.
    """
    plan, run = resolve(options, setup, command=command, recipe_name=recipe_name), Run.at(options.directory)
    if options.dry_run:
        dry_run_report(plan, run, make_model)
        return run
    with locked(run.path) if plan.writes and not run.is_finished else contextlib.nullcontext():
        images = "the images of their data, by its files or by the index of its records"
        check_equal_on_workers(plan.strategy, {"their settings or data": plan.number, images: plan.images})
        if run.is_finished:
            run.start(plan.settings, plan.data.labels, images=plan.images)
            print(f"{run.path} is finished: nothing to do.")
            return run

        _train(Training(plan, _started(plan, run, make_model, checkpoint), run, callbacks))
    if plan.writes:
        last = sorted(run.metrics()[-1].items())
        measured = [(name[4:], value) for name, value in last if name.startswith("val_")]
        metrics = ", ".join(f"{name} {value:{'.1%' if 'accuracy' in name else '.4f'}}" for name, value in measured)
        print(f"Trained: {metrics} on the evaluation images; see {run.path}.")
    return run


def _started(plan: Plan, run: Run, make_model: Callable[[int], keras.Model], checkpoint: str | None) -> Trainer:
    """Build the trainer, and write the first files of the run."""
    keras.utils.set_random_seed(plan.options.seed)
    if plan.execution.deterministic:
        tf.config.experimental.enable_op_determinism()
    trainer = build_trainer(
        lambda: make_model(len(plan.data.labels)),
        plan.recipe,
        plan.num_steps,
        strategy=plan.strategy,
        execution=plan.execution,
        seed=plan.options.seed,
        class_weights=plan.class_weights,
    )
    if plan.writes:
        weights = None if checkpoint is None else {"checkpoint": checkpoint, "license": license_of(checkpoint)}
        run.start(plan.settings, plan.data.labels, weights, images=plan.images)
        print_summary(plan, trainer.network)
        save_images(run, plan.data, preprocessing_of(trainer.network))
    return trainer


def _train(training: "Training") -> None:
    """Train until the end, and save curves and model."""
    plan, run, trainer = training.plan, training.run, training.trainer
    with (
        report_lost_workers(plan.strategy),
        training.signals.handled(),
        bad_examples_reported(plan.data.train, plan.data.evaluation),
    ):
        training.run_steps()
        training.signals.training_complete()
        if plan.writes:
            write_curves(run)  # before the model, which marks the run as finished
        model = trained_model(trainer) if plan.writes or trainer.reads_together else None
        if plan.writes:
            run.save_model(model)
        # No worker exits while the chief still writes.
        check_equal_on_workers(plan.strategy, {"the steps of the run": training.step})


class Training:
    """The steps of a run that its latest checkpoint leaves to do.

    An epoch here is what lies between two evaluations: one of the data, unless `--evaluate-every` says otherwise.
    """

    def __init__(self, plan: Plan, trainer: Trainer, run: Run, callbacks: Sequence[keras.callbacks.Callback] = ()):
        """Restore the latest checkpoint of a started run. Raises UserError if it does not fit the compiled trainer."""
        self.plan, self.trainer, self.run, self._callers_callbacks = plan, trainer, run, callbacks
        self.signals = StopSignals()
        self._epoch = plan.execution.evaluate_every or plan.epoch_steps
        self.step, self.records = 0, list[dict]()  # steps done, and the lines of metrics.jsonl
        self._seconds = 0.0  # that earlier processes spent on the current epoch
        if restored := checkpoints.restore(run.path / CHECKPOINTS, trainer.state):
            self.step, progress = restored
            self.records, self._seconds = progress["records"], progress["seconds"]
            for record in self.records:  # earlier versions counted evaluations
                record["epoch"] = self._epochs_of(record["step"])
            if self.plan.writes:
                print(f"Continuing after step {self.step:,}, in epoch {self.step // plan.epoch_steps + 1}.")

    def run_steps(self) -> None:
        """Train until the last step, or until a callback or a signal says so."""
        trainer, at_once = self.trainer, self.plan.execution.steps_per_execution
        check_equal_on_workers(trainer.distribute_strategy, {"the step of their checkpoint": self.step})
        self._log = MetricsLog(self.run, self.records) if self.plan.writes else None
        training, self._evaluation, self._evaluation_steps = self._data()
        batches = trainer.batches(training)
        trainer.make_train_function()
        trainer.make_test_function()
        trainer.stop_training = False
        with self._callbacks() as callbacks:
            callbacks.on_train_begin()
            while self.step < self.plan.num_steps and not trainer.stop_training:
                begin, end = self.step, min((self.step // self._epoch + 1) * self._epoch, self.plan.num_steps)
                callbacks.on_epoch_begin(len(self.records))
                start = time.monotonic()

                while self.step < end and not trainer.stop_training:
                    steps = min(at_once, end - self.step)
                    callbacks.on_train_batch_begin(self.step - begin)
                    if self.signals.received:
                        trainer.request_stop()  # of all workers, after this step
                    logs = _numbers(trainer.train_steps(batches, tf.constant(steps)))
                    self.step += steps
                    if not np.isfinite(logs["loss"]):
                        raise self.diverged()
                    seconds = time.monotonic() - start
                    rate = round((self.step - begin) * self.plan.recipe.batch_size / seconds, 1)
                    callbacks.on_train_batch_end(self.step - begin - 1, logs | {"images_per_second": rate})
                    if self.step < end:
                        self._save_within_epoch(steps, self._seconds + seconds)

                logs |= {f"val_{name}": value for name, value in self._evaluate(callbacks).items()}
                callbacks.on_epoch_end(len(self.records), dict(logs))
                self._end_epoch(logs, rate, self._seconds + time.monotonic() - start)
            callbacks.on_train_end(self.records[-1] if self.records else None)

    def _data(self) -> tuple:
        """Return the endless batches of training from the next step on, those of an evaluation, and their number."""
        plan, recipe, strategy = self.plan, self.plan.recipe, self.plan.strategy
        preprocessing, service = preprocessing_of(self.trainer.network), plan.options.data_service
        left = plan.num_steps - self.step
        # Images that are held here would be sent to the service.
        epochs = left / plan.epoch_steps if service is None else 0.0
        source = resized_once(plan.data, recipe, preprocessing, epochs=epochs, evaluations=left // self._epoch)
        num_classes, most = len(source.labels), _EVALUATION_BATCH
        of_training: Callable[..., tf.data.Dataset] = functools.partial(training_batches, num_classes=num_classes)
        of_evaluation: Callable[..., tf.data.Dataset] = functools.partial(evaluation_batches, num_classes=num_classes)
        if source.batches is not None:  # of large images
            of_training, of_evaluation, most = source.batches.training, source.batches.evaluation, recipe.batch_size
        if source.unlabelled is not None:
            of_training = functools.partial(semi_supervised_batches, source.unlabelled, num_classes=num_classes)
        training = functools.partial(of_training, source.train, recipe, preprocessing, seed=plan.options.seed)
        if service is not None:
            training = functools.partial(served_batches, service, training)
        training = functools.partial(training, first_step=self.step)
        examples, replicas = source.evaluation.num_examples, strategy.num_replicas_in_sync
        count = -(-examples // most)
        size = -(-examples // (count * replicas)) * replicas  # which they divide, with the least padding
        evaluation = functools.partial(of_evaluation, source.evaluation, preprocessing, batch_size=size)
        return distributed(strategy, recipe.batch_size, training), distributed(strategy, size, evaluation), count

    @contextlib.contextmanager
    def _callbacks(self) -> Iterator[keras.callbacks.CallbackList]:
        """The caller's callbacks and those of the options, with the display of the progress last."""
        execution, callbacks = self.plan.execution, [*self._callers_callbacks]
        with contextlib.ExitStack() as stack:
            if self.plan.writes and execution.inspect_every:
                make_model = functools.partial(trained_model, self.trainer)
                callbacks.append(InspectEpochs(make_model, self.run, execution.inspect_every))
            if self.plan.writes and execution.profile_steps:
                folder, per_execution = self.run.path / "profile", execution.steps_per_execution
                profile = ProfileSteps(folder, *execution.profile_steps, lambda: self.step, per_execution)
                stack.callback(profile.stop)
                callbacks.append(profile)
            if self.plan.writes and self.step < self.plan.num_steps:
                progress = TrainingProgress(lambda: self.step, self.plan.num_steps, self.plan.epoch_steps)
                stack.callback(progress.close)
                callbacks.append(progress)
            epochs = len(self.records) + -(-self.plan.num_steps // self._epoch) - self.step // self._epoch
            yield keras.callbacks.CallbackList(
                callbacks, add_history=True, model=self.trainer, epochs=epochs, steps=self._epoch
            )

    def _evaluate(self, callbacks: keras.callbacks.CallbackList) -> dict[str, float]:
        """Return the metrics of all evaluation examples."""
        trainer, at_once, done = self.trainer, self.plan.execution.steps_per_execution, 0
        batches = trainer.batches(self._evaluation)
        callbacks.on_test_begin()
        while done < self._evaluation_steps:
            steps = min(at_once, self._evaluation_steps - done)
            callbacks.on_test_batch_begin(done)
            logs = _numbers(trainer.test_steps(batches, tf.constant(steps)))
            done += steps
            callbacks.on_test_batch_end(done - 1, logs)
        callbacks.on_test_end(logs)
        return logs

    def _epochs_of(self, step: int) -> float:
        """Passes over the training data, a fraction where evaluations are more frequent."""
        epochs = step / self.plan.epoch_steps
        return int(epochs) if epochs.is_integer() else round(epochs, 3)

    def _end_epoch(self, logs: dict[str, float], images_per_second: float, seconds: float) -> None:
        """Save a checkpoint that begins the next epoch, and the metrics. Raises TrainingInterrupted after a signal."""
        record = {"epoch": self._epochs_of(self.step), "step": self.step, **logs}
        recipe = self.plan.recipe  # the optimizer has the learning rate of the next step
        rate = LearningRate(recipe.schedule, recipe.learning_rate, self.plan.num_steps)(self.step - 1)
        record["learning_rate"] = float(keras.ops.convert_to_numpy(rate))
        self.records.append(record | {"images_per_second": images_per_second, "seconds": round(seconds, 3)})
        self.trainer.reset_metrics()
        self._seconds = 0.0
        self._save(0.0)
        if self._log is not None:
            self._log.write(self.records)
        if self._stop_requested():
            raise TrainingInterrupted

    def _save_within_epoch(self, steps: int, seconds: float) -> None:
        """Save a checkpoint if it is time for one, or after a signal, which also raises TrainingInterrupted."""
        every, stop = self.plan.execution.checkpoint_every, self._stop_requested()
        if stop or (every and (self.step - steps) // every != self.step // every):
            self._save(seconds)
        if stop:
            raise TrainingInterrupted

    def _stop_requested(self) -> bool:
        """Whether any worker received a signal; the same answer in every worker."""
        of_any_worker = self.trainer.any_stop_requested()
        return self.signals.received if of_any_worker is None else of_any_worker

    def _save(self, seconds: float) -> None:
        """Save a checkpoint after `seconds` of the current epoch. Raises UserError if a weight is not finite."""
        arrays = {name: _Saved(variable, self) for name, variable in self.trainer.state.items()}
        if self.plan.writes:
            progress = {"records": self.records, "seconds": seconds}
            checkpoints.save(self.run.path / CHECKPOINTS, self.step, progress, arrays)
        elif self.trainer.reads_together:
            for array in arrays.values():
                np.asarray(array)

    def diverged(self) -> UserError:
        """The error for a loss or a weight that is not finite."""
        last = "the workdir keeps the last checkpoint: try a lower --learning-rate in a new workdir"
        return UserError(f"The loss or a weight is not finite at step {self.step}, so training stopped; {last}.")


class _Saved:
    """A variable that is read, and checked, when it is written. Raises UserError if a weight is not finite."""

    def __init__(self, variable: keras.Variable, training: Training):
        self._variable, self._training = variable, training

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = self._training.trainer.read(self._variable)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise self._training.diverged()
        return array


def _numbers(logs: dict) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}
