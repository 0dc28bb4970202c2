"""The functions that libraries have their patches made by, where these say whether they have made one. Nothing is imported to know their names."""

PATCHERS = {"unsloth_zoo.temporary_patches.utils": ("patch_function", "patch_function_past_key_values")}
"""By module, functions that are given a class, the name of a method and its replacement (or several, of which one has to fit), and return whether they have
replaced the method. unsloth_zoo has all of its patches of classes made by these, and looks at no answer."""
