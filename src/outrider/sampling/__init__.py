"""From logits to tokens: the logits pipeline, noise and acceptance."""
