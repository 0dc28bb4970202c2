"""Builds models: builtin tiny ones with an offline tokenizer, local folders, hub ids; adapters and quantisation."""
