"""A token takes the bytes of its row on the disk and next to nothing more, and a thousand requests at once no more memory than is set aside."""

from writer_disk import main, parser

from jobs.storage.row_pages import LIMIT_BYTES


def test_bytes_a_token_and_memory_of_a_thousand_requests(tmp_path):
    found = main(parser().parse_args([str(tmp_path), "--gib", "0.15", "--hidden", "512", "--samples", "1024"]))
    print(found)
    assert found["samples"] == 1024 and 1.0 <= found["of_the_rows"] < 1.02
    assert found["memory_mib"] < (LIMIT_BYTES >> 20) + 64
    assert found["mb_per_s"] > 0 and min(found["dd_mb_per_s"]) > 0  # the ratio of a quiet machine stands in NOTES.md
