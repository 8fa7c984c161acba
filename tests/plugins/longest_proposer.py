"""Outrider's proposers as vLLM loads them, without the controller: drafts are as long as may be."""

from outrider.plugins.vllm import proposer


class Proposer(proposer.Proposer):
    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self._lengths.choose = lambda sizes, most: [most] * len(sizes)


class SuffixProposer(Proposer):
    _ngram = False


class NgramProposer(Proposer):
    _suffix = False
