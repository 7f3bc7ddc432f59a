"""The numbers of the named recipes, as the papers and their code have them, and what no recipe may say."""

import dataclasses

import pytest

from keras_vit import MODELS, UserError
from keras_vit.cli import parser
from training.recipes.auto import DataFacts, auto_finetune_recipe, auto_recipe
from training.recipes.finetune import FINETUNE_NAMES, FINETUNE_RECIPES, bit_hyperrule, find_finetune_recipe
from training.recipes.overrides import overridden, with_crop
from training.recipes.pretrain import RECIPES, augreg, find_recipe
from training.recipes.recipe import PretrainRecipe, Recipe, Schedule

# Table 3 of "An Image is Worth 16x16 Words": decay of the rate and of the weights, dropout -> model, epochs, peak rate.
TABLE_3 = {
    ("linear", 0.1, 0.0): {
        "vit-b16-jft": ("ViT-B_16", 7, 8e-4), "vit-b32-jft": ("ViT-B_32", 7, 8e-4),
        "vit-l32-jft": ("ViT-L_32", 7, 6e-4), "vit-l16-jft": ("ViT-L_16", 7, 4e-4),
        "vit-l16-jft-14ep": ("ViT-L_16", 14, 4e-4), "vit-h14-jft": ("ViT-H_14", 14, 3e-4),
        "r50-vit-b16-jft": ("R50+ViT-B_16", 7, 8e-4), "r50-vit-b32-jft": ("R50+ViT-B_32", 7, 8e-4),
        "r50-vit-l32-jft": ("R50+ViT-L_32", 7, 2e-4), "r50-vit-l16-jft": ("R50+ViT-L_16", 7, 4e-4),
        "r50-vit-l16-jft-14ep": ("R50+ViT-L_16", 14, 4e-4),
    },
    ("linear", 0.1, None): {
        "r50x1-jft": ("BiT-R50x1", 7, 1e-3), "r50x2-jft": ("BiT-R50x2", 7, 1e-3), "r101x1-jft": ("BiT-R101x1", 7, 8e-4),
        "r152x1-jft": ("BiT-R152x1", 7, 6e-4), "r152x2-jft": ("BiT-R152x2", 7, 6e-4),
    },
    ("linear", 0.03, 0.1): {
        "vit-b16-i21k": ("ViT-B_16", 90, 1e-3), "vit-b32-i21k": ("ViT-B_32", 90, 1e-3),
        "vit-l16-i21k": ("ViT-L_16", 30, 1e-3), "vit-l16-i21k-90ep": ("ViT-L_16", 90, 1e-3),
        "vit-l32-i21k": ("ViT-L_32", 30, 1e-3), "vit-l32-i21k-90ep": ("ViT-L_32", 90, 1e-3),
    },
    ("cosine", 0.3, 0.1): {
        "vit-b16-i1k": ("ViT-B_16", 300, 3e-3), "vit-b32-i1k": ("ViT-B_32", 300, 3e-3),
        "vit-l16-i1k": ("ViT-L_16", 300, 3e-3), "vit-l32-i1k": ("ViT-L_32", 300, 3e-3),
    },
}  # fmt: skip
ROWS = [(name, *row, *key) for key, rows in TABLE_3.items() for name, row in rows.items()]


@pytest.mark.parametrize(("name", "model", "epochs", "rate", "decay", "weight_decay", "dropout"), ROWS)
def test_pre_training_is_that_of_table_3(name, model, epochs, rate, decay, weight_decay, dropout):
    recipe = RECIPES[name]
    found = recipe.epochs, recipe.learning_rate, recipe.schedule.decay, recipe.weight_decay
    assert found == (epochs, rate, decay, weight_decay)
    assert (recipe.optimizer, recipe.batch_size, recipe.image_size) == ("adamw", 4096, (224, 224))
    assert recipe.schedule.warmup_steps == 10_000
    assert recipe.clip_norm == (1.0 if name.endswith("i1k") else None)
    if dropout is None:
        assert recipe.model == MODELS[model]
    else:
        width = MODELS[model].hidden_size
        assert recipe.model == dataclasses.replace(MODELS[model], dropout_rate=dropout, representation_size=width)


@pytest.mark.parametrize(
    ("name", "steps", "rates"),
    [
        ("imagenet", 20_000, (0.003, 0.01, 0.03, 0.06)), ("cifar100", 10_000, (0.001, 0.003, 0.01, 0.03)),
        ("cifar10", 10_000, (0.001, 0.003, 0.01, 0.03)), ("pets", 500, (0.001, 0.003, 0.01, 0.03)),
        ("flowers", 500, (0.001, 0.003, 0.01, 0.03)), ("vtab", 2500, (0.01,)),
    ],
)  # fmt: skip
def test_fine_tuning_is_that_of_table_4(name, steps, rates):
    recipe = FINETUNE_RECIPES[f"vit-finetune-{name}"]
    assert (recipe.steps, recipe.batch_size, recipe.optimizer, recipe.weight_decay) == (steps, 512, "sgd", 0.0)
    assert recipe.learning_rate in rates
    assert (recipe.schedule.decay, recipe.clip_norm, recipe.image_size) == ("cosine", 1.0, (384, 384))
    for side in (512, 518) if name == "imagenet" else ():  # Table 2 averages the weights
        larger = FINETUNE_RECIPES[f"vit-finetune-imagenet-{side}"]
        assert larger == dataclasses.replace(recipe, image_size=(side, side), ema_decay=0.9999)


@pytest.mark.parametrize(
    ("name", "steps", "warmup_steps"), [("", 10_000, 500), ("-imagenet", 20_000, 500), ("-augreg", 500, 100)]
)
def test_the_defaults_of_vit_jax(name, steps, warmup_steps):
    recipe = FINETUNE_RECIPES[f"vit-jax-finetune{name}"]
    assert (recipe.steps, recipe.schedule.warmup_steps, recipe.learning_rate) == (steps, warmup_steps, 0.03)
    assert (recipe.batch_size, recipe.accumulation, recipe.clip_norm, recipe.optimizer) == (512, 8, 1.0, "sgd")
    assert recipe.inception_crop
    assert recipe.flip
    assert recipe.preprocessing(3).resize == "stretch"


AUGMENTATIONS = {
    "none": (0, 0, 0), "light1": (2, 0, 0), "light2": (2, 10, 0.2), "medium1": (2, 15, 0.2), "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5), "strong2": (2, 20, 0.8),
}  # fmt: skip


@pytest.mark.parametrize("data", ["i1k", "i21k"])
@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_the_28_settings_of_augreg(augmentation, data):
    for regularized in (False, True):
        for weight_decay in (0.1, 0.03):
            name = f"augreg-b16-{data}-{augmentation}{'-reg' * regularized}{'-wd0.03' * (weight_decay == 0.03)}"
            recipe = find_recipe(name)
            assert recipe == augreg("b16", data, augmentation, regularized=regularized, weight_decay=weight_decay)
            assert (recipe.randaugment_layers, recipe.randaugment_magnitude, recipe.mixup) == AUGMENTATIONS[
                augmentation
            ]
            assert recipe.model.dropout_rate == recipe.model.stochastic_depth_rate == 0.1 * regularized
            assert recipe.weight_decay == weight_decay
            assert (recipe.learning_rate, recipe.batch_size, recipe.epochs) == (1e-3, 4096, 300)
            assert (recipe.schedule.decay, recipe.schedule.warmup_steps, recipe.clip_norm) == ("cosine", 10_000, 1.0)
            assert (recipe.loss, recipe.head_bias) == ("sigmoid", {"i1k": -6.9, "i21k": -10.0}[data])
            assert recipe.inception_crop
            assert recipe.flip
            assert recipe.model.classifier == {"i1k": "token", "i21k": "gap"}[data]
            assert recipe.model.representation_size == {"i1k": 768, "i21k": None}[data]


@pytest.mark.parametrize(
    ("data", "choices"),
    [("i1k", "light1 medium1 medium2 medium2 medium2 medium2"), ("i21k", "none none light1 light2 light2 medium2")],
)
def test_each_model_of_augreg_has_big_visions_choice(data, choices):
    for model, augmentation in zip(("ti16", "s32", "s16", "b32", "b16", "l16"), choices.split(), strict=True):
        assert RECIPES[f"augreg-{model}-{data}"] == augreg(model, data, augmentation)


@pytest.mark.parametrize(("ending", "epochs"), [("", 90), ("-150ep", 150), ("-300ep", 300)])
def test_the_better_plain_baseline(ending, epochs):
    recipe = RECIPES[f"vit-s16-i1k-better-plain{ending}"]
    assert (recipe.epochs, recipe.batch_size, recipe.learning_rate, recipe.mixup) == (epochs, 1024, 1e-3, 0.2)
    assert recipe.weight_decay * recipe.learning_rate == pytest.approx(1e-4)  # as big_vision counts it
    assert (recipe.randaugment_layers, recipe.randaugment_magnitude, recipe.loss) == (2, 10.0, "softmax")
    assert (recipe.schedule.decay, recipe.schedule.warmup_steps) == ("cosine", 10_000)
    assert (recipe.model.classifier, recipe.model.position_embedding) == ("gap", "sincos-2d")
    assert recipe.model.representation_size == recipe.model.hidden_size == 384
    assert recipe.preprocessing(3).crop_from == 256


@pytest.mark.parametrize(
    ("data", "epochs", "stairs"), [("s", 90, (30, 60, 80)), ("m", 90, (30, 60, 80)), ("l", 40, (10, 23, 30, 37))]
)
def test_pre_training_of_bit(data, epochs, stairs):
    recipe = RECIPES[f"bit-{data}-r101x3"]
    assert recipe.model == MODELS["BiT-R101x3"]
    assert (recipe.optimizer, recipe.learning_rate, recipe.weight_decay) == ("sgd", 0.03 * 4096 / 256, 1e-4)
    assert (recipe.epochs, recipe.batch_size, recipe.clip_norm) == (epochs, 4096, None)
    assert (recipe.schedule.decay, recipe.schedule.warmup_steps) == ("stair", 5000)
    assert [round(share * epochs) for share in recipe.schedule.stairs] == list(stairs)


@pytest.mark.parametrize(
    ("numbers", "count", "steps", "stairs", "warmup_steps", "mixup"),
    [
        ("paper", 19_999, 500, (150, 300, 450), 0, 0.0),
        ("paper", 20_000, 10_000, (3000, 6000, 9000), 0, 0.1),
        ("paper", 500_000, 20_000, (6000, 12_000, 18_000), 0, 0.1),
        ("code", 19_999, 500, (200, 300, 400), 100, 0.0),
        ("code", 20_000, 10_000, (3000, 6000, 9000), 500, 0.1),
        ("code", 500_000, 20_000, (6000, 12_000, 18_000), 500, 0.1),
    ],
)
def test_the_hyperrule_by_the_size_of_the_set(numbers, count, steps, stairs, warmup_steps, mixup):
    recipe = bit_hyperrule(numbers, count, (500, 375))
    assert recipe == find_finetune_recipe(f"bit-hyperrule-{numbers}", count, (500, 375))
    assert (recipe.steps, recipe.mixup, recipe.mixup_partner) == (steps, mixup, "opposite")
    assert tuple(round(share * steps) for share in recipe.schedule.stairs) == stairs
    assert recipe.schedule.warmup_steps == warmup_steps
    assert (recipe.learning_rate, recipe.batch_size, recipe.optimizer, recipe.weight_decay) == (0.003, 512, "sgd", 0)


@pytest.mark.parametrize(("numbers", "large"), [("paper", (448, 384, 384)), ("code", (512, 480, 480))])
def test_the_hyperrule_by_the_area_of_the_images(numbers, large):
    for size, sides in (((95, 97), (160, 128, 128)), ((96, 96), large)):
        recipe = bit_hyperrule(numbers, 1000, size)
        assert (recipe.crop_from, *recipe.image_size) == sides
        assert recipe.preprocessing(3).crop_from is None  # tested on the whole square


def test_early_convolutions():
    recipe = RECIPES["vit-c-4gf"]
    assert recipe.model == MODELS["ViT_C-4GF"]
    assert (recipe.batch_size, recipe.label_smoothing, recipe.mixup, recipe.cutmix) == (2048, 0.1, 0.8, 1.0)
    assert recipe.autoaugment
    assert recipe.ema_decay is not None
    assert (recipe.schedule.warmup_steps, recipe.clip_norm) == (3125, None)


def test_the_nearest_names_answer_an_unknown_one():
    with pytest.raises(UserError, match="no recipe named 'vit-b16-i22k'; the nearest names"):
        find_recipe("vit-b16-i22k")
    with pytest.raises(UserError, match="no recipe named 'bit-hyperrule'; the nearest names"):
        find_finetune_recipe("bit-hyperrule", 1, (1, 1))
    assert len(set(FINETUNE_NAMES)) == len(FINETUNE_NAMES)


def test_steps_examples_or_epochs():
    recipe = RECIPES["digits"]
    assert recipe.num_steps(1437) == 80 * (1437 // 32)
    assert dataclasses.replace(recipe, examples=1000).num_steps(1437) == 31
    assert dataclasses.replace(recipe, examples=1000, steps=7).num_steps(1437) == 7


def parse(name: str, *arguments: str) -> PretrainRecipe:
    recipe = find_recipe(name)
    given = parser.read(PretrainRecipe, arguments, prog="test", **vars(recipe))
    return overridden(parser.options_from(PretrainRecipe, given, prog="test", **vars(recipe)), recipe)


def test_the_duration_given_is_the_one_that_counts():
    assert parse("digits", "--examples", "99").epochs is None
    assert parse("digits", "--steps", "9", "--epochs", "None").num_steps(1437) == 9
    assert parse("digits", "--epochs", "2").num_steps(1437) == 88
    steps = dataclasses.replace(find_recipe("digits"), epochs=None, steps=500)
    assert overridden(dataclasses.replace(steps, epochs=3), steps).num_steps(32) == 3
    with pytest.raises(UserError, match="one duration, but was given --steps 9 and --epochs"):
        parse("digits", "--epochs", "2", "--steps", "9")


@pytest.mark.parametrize("name", ["digits", "bit-s-r50x1", "r50-vit-b16-jft", "vit-c-1gf"])
def test_any_field_of_any_family_is_set_by_an_option_of_its_type(name):
    assert parse(name) == find_recipe(name)
    options = ["--ema-decay", "0.9", "--freeze", "embedding", "cls", "--warmup-steps", "3", "--loss", "sigmoid"]
    recipe = parse(name, *options, "--clip-norm", "None", "--mixup", "0.3")
    assert (recipe.ema_decay, recipe.freeze, recipe.clip_norm, recipe.mixup) == (0.9, ("embedding", "cls"), None, 0.3)
    assert (recipe.schedule.warmup_steps, recipe.loss) == (3, "sigmoid")


@pytest.mark.parametrize("wrong", ["--mixup much", "--loss hinge", "--epochs 1.5", "--dropout 0.1"])
def test_what_is_no_value_of_an_option_ends_the_command(wrong):
    with pytest.raises(SystemExit) as stopped:
        parse("digits", *wrong.split())
    assert stopped.value.code == 2


UNPOOLED = dataclasses.replace(RECIPES["digits"].model, classifier="unpooled")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"epochs": None}, "needs steps, examples or epochs; give one, such as --epochs 10"),
        ({"learning_rate": float("inf")}, "learning-rate must be a finite number, but is inf"),
        ({"schedule": Schedule("linear", linear_end=0.01)}, "must not rise, but linear_end is 0.01 and the peak 0.002"),
        ({"label_smoothing": 1.0}, r"label-smoothing must be in \[0, 1\)"),
        ({"model": UNPOOLED}, "not the classifier 'unpooled'"),
        ({"accumulation": 5}, "accumulation must divide the batch of 32, but is 5"),
        ({"freeze": ("cls", "head")}, "--freeze head would keep the new head at zeros, from which no layer learns"),
        ({"freeze": ("cls",), "lora": 2}, "--freeze applies only to training without --lora"),
        ({"randaugment_magnitude": 9.0}, "randaugment-magnitude applies only to --randaugment-layers"),
        ({"resize": "crop", "crop_from": 9}, "crop-from applies only to --resize resize-small, or"),
        ({"inception_crop": True, "crop_from": 9}, "crop-from applies only to .* without --inception-crop"),
        ({"crop_from": 7}, r"crop-from must be at least both sides of --image-size, \(8, 8\), but is 7"),
        ({"channels": 2}, "channels must be 1 for grayscale or 3 for RGB, but are 2"),
    ],
)
def test_what_is_no_recipe_is_refused(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        dataclasses.replace(RECIPES["digits"], **fields)


def test_a_resnet_has_no_blocks_for_a_layer_decay():
    with pytest.raises(UserError, match="--layer-decay applies only to a Vision Transformer"):
        parse("bit-s-r50x1", "--layer-decay", "0.9")


def test_every_named_recipe_is_taken_as_it_is():
    by_data = [bit_hyperrule(kind, count, (300, 300)) for kind in ("paper", "code") for count in (1000, 10**6)]
    by_data += [auto_recipe(DataFacts(1000, (64, 64))), auto_finetune_recipe(DataFacts(1000, (64, 64)))]
    for recipe in (*RECIPES.values(), *FINETUNE_RECIPES.values(), *by_data):
        assert overridden(recipe, recipe) == recipe


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("digits", "--lora-on key", "--lora-on applies only to --lora; give that, or leave it out"),
        ("digits", "--mixup-partner opposite", "--mixup-partner applies only to --mixup or --cutmix; give"),
        ("digits", "--stairs 0.5", "--stairs applies only to --decay stair; give"),
        ("digits", "--decay constant --linear-end 0", "--linear-end applies only to --decay linear; give"),
        ("vit-b16-jft", "--timescale 9", "--timescale applies only to --decay rsqrt; give"),
        ("digits", "--prototypes 9", "--prototypes applies only to --target self-distillation; give"),
        ("mnist-mae", "--head-width 64", "--head-width applies only to --target self-distillation; give"),
        ("mnist-dino", "--local-crops 0 --local-size 8", "--local-size applies only to --local-crops of at least 1;"),
        ("digits", "--corruption 0.7", "--corruption applies only to a --target of masked patches; give"),
        ("masked-patch", "--decoder-width 64", "--decoder-width applies only to --decoder-layers of a --target of"),
        ("mnist-mae", "--loss sigmoid", "--loss applies only to --target classes; give"),
        ("digits", "--teacher x --label-smoothing 0.2", "--label-smoothing applies only to labels, which a soft"),
    ],
)
def test_an_option_without_effect_is_refused(name, options, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(name, *options.split())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bit-s-r50x1", "--decay cosine"),
        ("deit3-like", "--mixup 0 --cutmix 0"),
        ("mnist-dino", "--target classes"),
        ("mnist-mae", "--target patch-4x4 --decoder-layers 0"),
        ("augreg-b16-i1k", "--target patch-color --mixup 0 --head-bias 0 --model.representation-size None"),
        ("digits", "--cutmix 1 --mixup-partner opposite"),
        ("digits", "--teacher x --label-smoothing 0"),
    ],
)
def test_what_a_recipe_brings_along_may_stay_without_effect(name, options):
    assert parse(name, *options.split()) != find_recipe(name)


@pytest.mark.parametrize(
    ("arguments", "crop_from"),
    [
        ([], 256), (["--image-size", "96"], 110), (["--image_size=448"], 512),
        (["--image-size", "112", "56", "--steps", "3"], 128), (["--image-size", "96", "--crop_from", "97"], 97),
        (["--resize", "pad"], None), (["--resize", "stretch"], 256),
    ],
)  # fmt: skip
def test_the_same_part_of_an_image_is_seen_at_another_image_size(arguments, crop_from):
    recipe = FINETUNE_RECIPES["photos-finetune"]
    given = parser.read(Recipe, arguments, prog="test", **vars(recipe))
    of_recipe = {("recipe", *path): value for path, value in given.items()}
    assert with_crop(of_recipe, recipe).get(("recipe", "crop_from"), recipe.crop_from) == crop_from
    assert with_crop(of_recipe, dataclasses.replace(recipe, resize="stretch", crop_from=None)) == of_recipe
