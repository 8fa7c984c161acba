"""Imported by the process that engines and servers of tests are forked from: all that they import.

Configs and tokenizers are read without torch's compiler, as engines read them.
"""

import gc

from outrider.checkpoints.configs import auto_config

auto_config().for_model("llama")
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401

gc.collect()
gc.freeze()  # a child's collector need not search what is loaded
