"""Imported by the process that engines of tests are forked from: all that they import."""

import gc

from transformers import AutoConfig, AutoTokenizer  # noqa: F401

import outrider.engine.worker.worker  # noqa: F401

gc.collect()
gc.freeze()  # a child's collector need not search what is loaded
