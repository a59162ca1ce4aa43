import pytest

from paddle_resnet.data.class_in_name import class_of, is_ambiguous


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/cat.0.jpg", "cat"),
        ("american_bulldog_100.jpg", "american_bulldog"),
        ("Tom & Jerry (3).png", "Tom & Jerry"),
        ("rose - 3.jpg", "rose"),
        ("cloudy12.jpg", "cloudy"),
        ("café(3).jpg", "café"),
        ("n02085620_5927.JPEG", "n02085620"),
        ("obj1__0.png", "obj1"),
        ("1.jpg", None),
        ("cat.jpg", None),
        ("(3).jpg", None),
    ],
)
def test_class_is_the_name_before_the_last_number(name, expected):
    assert class_of(name) == expected
    assert expected is None or not is_ambiguous(expected)


@pytest.mark.parametrize("name", ["cat_1_2.jpg", "3_07.jpg", "IMG_20230101_123456.jpg", "cat (1) (2).jpg"])
def test_names_with_several_numbers_are_ambiguous(name):
    assert is_ambiguous(class_of(name))
