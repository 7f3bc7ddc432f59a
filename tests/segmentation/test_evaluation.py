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
from tests.segmentation.reference import instance_segments, panoptic_segments, semantic_scores
from tests.segmentation.shapes import scene
from training.data.annotations.masks import NONE, UNCOUNTED
from training.options.dense import SegmentPredictOptions
from training.segmentation.evaluation import color_of, evaluate, overlay, panoptic_counts, write_report
from training.segmentation.segmenter import class_map


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


def test_a_perfect_answer_has_quality_and_precision_1():
    segments = np.zeros((12, 12), np.int32)
    segments[:4, :4], segments[6:, 6:] = 1, 2
    truth = ([0, 1, 1], segments)
    for kind, name in (("panoptic", "pq"), ("instance", "ap")):
        metrics = evaluate(oracle(kind, [found_of(*truth)]), split_of([segments_of(*truth)])).metrics
        assert metrics[name] == pytest.approx(1.0)


def test_panoptic_quality_is_that_of_its_definition():
    """Hand-counted: of class a an IoU of 12/16 and of class b one match of 9/9, a miss and a false segment."""
    truth, found = np.full((6, 10), NONE, np.int32), np.full((6, 10), NONE, np.int32)
    truth[:4, :4], found[:4, :3] = 0, 0  # 12 of 16
    truth[:3, 5:8], found[:3, 5:8] = 1, 1  # 9 of 9
    truth[4:, 7:] = 2  # missed
    found[4:, :2], truth[4:, :2] = 2, 0  # false: the truth there is of class a
    truth[4:, :2] = 3
    counts = panoptic_counts(segments_of([0, 1, 1, 0], truth), (np.array([0, 1, 1]), found), 2)
    np.testing.assert_allclose(counts, [[12 / 16, 1, 0, 1], [1, 1, 1, 1]])


def test_false_segments_mostly_on_void_do_not_count():
    truth, found = np.full((4, 4), UNCOUNTED, np.int32), np.zeros((4, 4), np.int32)
    truth[0] = 0
    counts = panoptic_counts(segments_of([1], truth), (np.array([0]), found), 2)
    np.testing.assert_allclose(counts, [[0, 0, 0, 0], [0, 0, 0, 1]])
    # Void pixels are not in the union either.
    counts = panoptic_counts(segments_of([0], truth), (np.array([0]), found), 2)
    np.testing.assert_allclose(counts[0], [1, 1, 0, 0])
    # Half of a segment is not most of it, and a class with false segments alone has a quality of 0.
    truth[1] = 0
    metrics = evaluate(oracle("panoptic", [found_of([1], found)]), split_of([segments_of([0], truth)])).metrics
    assert metrics["classes"]["b"] == {"pq": 0.0, "sq": 0.0, "rq": 0.0}


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


def test_segments_in_a_graph_are_those_of_transformers_functions():
    """On stretched images the maps are those of `reference.py`, which are transformers'."""
    rng = np.random.default_rng(2)
    logits, masks = rng.normal(0, 3, (1, 6, 5)).astype(np.float32), rng.normal(0, 3, (1, 8, 8, 6)).astype(np.float32)
    outputs, size, image = {"class_logits": logits, "mask_logits": masks}, (16, 16), (23, 31)
    preprocessing = keras_vit.Preprocessing(size)
    scores = semantic_scores(logits[0], masks[0], size, image)
    found = segment_outputs(outputs, SegmentationConfig(4), preprocessing, image)["label_map"][0]
    assert np.mean(np.asarray(found) == scores.argmax(axis=-1)) > 0.999

    # These two expect the image in the upper left corner; a square one fills the input.
    image = (29, 29)
    task = SegmentationConfig(4, task="panoptic", stuff=(0, 2))
    found = segment_outputs(outputs, task, preprocessing, image, threshold=0.3)
    expected, segments = panoptic_segments(logits[0], masks[0], size, image, 0.3, stuff=(0, 2))
    got = np.append(np.asarray(found["classes"][0]), -1)[np.asarray(found["segment_map"][0])]
    wanted = np.array([*(segment.label for segment in segments), -1])[expected]
    assert segments
    assert np.mean(got == wanted) > 0.999
    found = segment_outputs(outputs, SegmentationConfig(4, task="instance"), preprocessing, image)
    _, segments = instance_segments(logits[0], masks[0], size, image, threshold=0.0)
    np.testing.assert_allclose(found["scores"][0], [segment.score for segment in segments], atol=2e-6)
    np.testing.assert_array_equal(found["classes"][0], [segment.label for segment in segments])


def test_a_padded_image_is_seen_without_its_padding():
    preprocessing = keras_vit.Preprocessing((16, 16), resize="pad", padding="after")
    masks = np.full((1, 16, 16, 2), -9.0, np.float32)
    masks[:, :8, :, 0] = 9.0  # the upper half of the input, which is all that a wide image covers
    masks[:, 8:, :, 1] = 9.0
    outputs = {"class_logits": np.array([[[9.0, 0, 0], [0, 9.0, 0]]], np.float32), "mask_logits": masks}
    found = segment_outputs(outputs, SegmentationConfig(2), preprocessing, (10, 20))["label_map"]
    assert not np.asarray(found).any()


def test_colors_are_told_apart_and_none_stays_as_it_is():
    pixels, classes, segments = scene(3)
    drawn = overlay(pixels, np.where(segments == 0, NONE, segments), classes)
    untouched = (segments == 0) & (drawn == pixels).all(axis=-1)
    assert untouched.sum() > 0.5 * (segments == 0).sum()
    colors = color_of(np.arange(24))
    apart = np.abs(colors[:, None] - colors[None]).sum(axis=-1) + 1e3 * np.eye(24)
    assert apart.min() > 20
    assert class_map((np.array([2]), np.array([[0, NONE, UNCOUNTED]]))).tolist() == [[2, NONE, UNCOUNTED]]
