"""eagle3-job: from prompts to a verified EAGLE-3 draft head in a bucket.

Read `pipeline.py` first: it is the table of contents.
"""

__version__ = "0.1.0"
