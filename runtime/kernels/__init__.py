"""The sparse FFN, once per technology; :mod:`.sparse_ffn_reference` is the one every other must equal."""
