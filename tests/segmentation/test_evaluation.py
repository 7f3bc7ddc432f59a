"""mIoU, mask AP and panoptic quality on scenes whose answers are known."""

import dataclasses
import json

import numpy as np
import pytest

import keras_vit
from keras_vit import SegmentationConfig, UserError
from keras_vit.models.config import SEGMENT_THRESHOLD
from keras_vit.models.segmentation import segment_outputs
from tests.segmentation.oracle import Oracle, found_of, oracle, segments_of, split_of
from tests.segmentation.shapes import scene
from tests.support import randomize
from training.data.annotations.masks import NONE, UNCOUNTED
from training.options.dense import SegmentPredictOptions
from training.segmentation import segmenter as module
from training.segmentation.evaluation import color_of, evaluate, overlay, write_report
from training.segmentation.segmenter import Segmenter, class_map


def test_iou_is_counted_at_the_size_of_the_masks_and_without_uncounted_pixels(tmp_path):
    truth = np.zeros((10, 20), np.int32)
    truth[:, :5], truth[0] = 1, UNCOUNTED
    half = np.where(np.arange(20) < 10, 1, 0) * np.ones((10, 1), np.int32)
    answer = found_of([0, 1], half.astype(np.int32))
    segments = segments_of([0, 1], truth, objects=[False, False])
    evaluation = evaluate(oracle("semantic", [answer] * 3), split_of([segments] * 3))
    metrics = evaluation.metrics
    assert metrics["classes"] == {"a": {"iou": pytest.approx(10 / 15)}, "b": {"iou": pytest.approx(5 / 10)}}
    assert metrics["mean_iou"] == pytest.approx((10 / 15 + 5 / 10) / 2)
    assert metrics["pixel_accuracy"] == pytest.approx(15 / 20)
    assert metrics["intervals"]["mean_iou"] == [metrics["mean_iou"]] * 2  # all images are alike
    write_report(evaluation, tmp_path)
    assert json.loads((tmp_path / "segmentation.json").read_text())["pictures"] == 3
    assert "Mean IoU 0.583" in (tmp_path / "segmentation.md").read_text()
    assert "75% of the pixels have the right class" in (tmp_path / "segmentation.html").read_text()


@pytest.mark.parametrize(("marked", "crowds"), [(UNCOUNTED, None), (1, [False, True])])
def test_masks_of_crowds_are_no_false_alarms(marked, crowds):
    segments = np.full((8, 8), NONE, np.int32)
    segments[:4, :4], segments[4:] = 0, marked
    answer = np.full((8, 8), NONE, np.int32)
    answer[:4, :4], answer[4:] = 0, 1
    answer[answer >= 0] = 1 - answer[answer >= 0]  # the crowd has the higher score
    truth = segments_of([1] * (1 if crowds is None else 2), segments, crowds=crowds)
    metrics = evaluate(oracle("instance", [found_of([1, 1], answer, [0.9, 0.5])]), split_of([truth])).metrics
    assert metrics["ap"] == pytest.approx(1.0)
    assert metrics["ignored"] == pytest.approx(0.5)


def test_panoptic_quality_is_that_of_the_segments_that_predict_writes():
    seen = []

    class Asked(Oracle):
        def segment(self, pixels, threshold=SEGMENT_THRESHOLD):
            seen.append(threshold)
            return super().segment(pixels, threshold)

    truth = segments_of([0], np.zeros((4, 4), np.int32))
    segmenter = oracle("panoptic", [found_of([0], truth.map)])
    metrics = evaluate(Asked(**vars(segmenter)), split_of([truth])).metrics
    assert seen == [metrics["threshold"]] == [SEGMENT_THRESHOLD]
    fields = {field.name: field.default for field in dataclasses.fields(SegmentPredictOptions)}
    assert fields["threshold"] == SEGMENT_THRESHOLD


def test_a_report_begins_with_many_ignored_pixels(tmp_path):
    truth = np.full((10, 10), NONE, np.int32)
    truth[:, :3], truth[0] = 0, UNCOUNTED
    segments = segments_of([0], truth, objects=[False])
    answer = found_of([0, 1], np.zeros((10, 10), np.int32))
    evaluation = evaluate(oracle("semantic", [answer]), split_of([segments]))
    write_report(evaluation, tmp_path)
    assert evaluation.metrics["ignored"] == pytest.approx(0.73)
    first = (tmp_path / "segmentation.md").read_text().splitlines()[2]
    assert first.startswith(
        "73.0% of the pixels of the evaluation masks are ignored: 63.0% have no annotation and 10.0%"
    )
    assert "Mean IoU 1.000" in first


@pytest.mark.parametrize("kind", ["semantic", "instance", "panoptic"])
def test_masks_without_anything_cannot_be_measured(kind):
    nothing = np.full((4, 4), UNCOUNTED, np.int32)
    answer = found_of([0, 1], np.zeros((4, 4), np.int32))
    if kind == "panoptic":
        answer = found_of([], np.full((4, 4), NONE, np.int32))
    with pytest.raises(UserError, match=f"nothing that can be measured for {kind}"):
        evaluate(oracle(kind, [answer]), split_of([segments_of([], nothing)]))


def test_a_padded_image_is_seen_without_its_padding():
    preprocessing = keras_vit.Preprocessing((16, 16), resize="pad", padding="after")
    masks = np.full((1, 16, 16, 2), -9.0, np.float32)
    masks[:, :8, :, 0] = 9.0  # the upper half of the input, which is all that a wide image covers
    masks[:, 8:, :, 1] = 9.0
    outputs = {"class_logits": np.array([[[9.0, 0, 0], [0, 9.0, 0]]], np.float32), "mask_logits": masks}
    found = segment_outputs(outputs, SegmentationConfig(2), preprocessing, (10, 20))["label_map"]
    assert not np.asarray(found).any()


def test_objects_are_the_same_however_many_maps_are_made_at_a_time(monkeypatch):
    model = randomize(oracle("instance", []).model)
    segmenter = Segmenter("model", model, ("a", "b"), keras_vit.task_of(model))
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
    whole = segmenter.segment(pixels, 0.0)
    assert len(whole.labels) > 1
    calls, made = [], segment_outputs
    monkeypatch.setattr(module, "segment_outputs", lambda *args, **more: calls.append(1) or made(*args, **more))
    monkeypatch.setattr(module, "_MOST_VALUES", 1)
    parts = segmenter.segment(pixels, 0.0)
    assert len(calls) == 2
    np.testing.assert_array_equal(parts.labels, whole.labels)
    np.testing.assert_array_equal(parts.masks, whole.masks)
    np.testing.assert_allclose(parts.scores, whole.scores, rtol=1e-5)


def test_colors_are_told_apart_and_none_stays_as_it_is():
    pixels, classes, segments = scene(3)
    drawn = overlay(pixels, np.where(segments == 0, NONE, segments), classes)
    untouched = (segments == 0) & (drawn == pixels).all(axis=-1)
    assert untouched.sum() > 0.5 * (segments == 0).sum()
    colors = color_of(np.arange(24))
    apart = np.abs(colors[:, None] - colors[None]).sum(axis=-1) + 1e3 * np.eye(24)
    assert apart.min() > 20
    assert class_map((np.array([2]), np.array([[0, NONE, UNCOUNTED]]))).tolist() == [[2, NONE, UNCOUNTED]]
