"""Describes the model, the machine and the activity: which FFN neurons a language model has and how often each fires."""
