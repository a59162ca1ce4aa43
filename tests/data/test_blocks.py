from paddle_resnet.data.blocks import Blocks


def test_least_recently_used_blocks_are_dropped():
    loaded, blocks = [], Blocks(limit_bytes=10)

    def get(key, size):
        return blocks.get(key, lambda: loaded.append(key) or key * size, len)

    assert [get("a", 4), get("b", 4), get("a", 4), get("c", 4), get("a", 4), get("b", 4)] == [
        *("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb")
    ]
    assert loaded == ["a", "b", "c", "b"]


def test_block_above_the_limit_is_kept_alone():
    loaded, blocks = [], Blocks(limit_bytes=10)
    for key in "aabb":
        blocks.get(key, lambda key=key: loaded.append(key) or key * 20, len)
    assert loaded == ["a", "b"]
