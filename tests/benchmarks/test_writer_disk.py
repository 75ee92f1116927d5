"""A token takes the bytes of its row on the disk and next to nothing more, and a thousand requests at once no more memory than is set aside."""

from writer_disk import main, parser


def test_bytes_a_token_and_memory_of_a_thousand_requests(tmp_path):
    rows, limit = 0.15, 48  # GiB are written through MiB
    found = main(
        parser().parse_args([str(tmp_path), "--gib", str(rows), "--hidden", "512", "--samples", "1024", "--memory-mib", str(limit)])
    )
    print(found)
    assert found["samples"] == 1024 and 1.0 <= found["of_the_rows"] < 1.02
    # Beside the buffer: its steps on the way to it, and what is being written.
    assert found["memory_mib"] < limit + 48 < 1024 * rows
    assert found["mb_per_s"] > 0 and min(found["dd_mb_per_s"]) > 0  # the ratio of a quiet machine stands in NOTES.md
