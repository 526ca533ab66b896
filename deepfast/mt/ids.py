"""The token ids that all vocabularies and models have."""

PAD, UNK, BOS, EOS = 0, 1, 2, 3
