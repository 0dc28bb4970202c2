"""One module for each failure: what is known of it, and what finds it. Any module here that has ``RULES`` is a part of the program."""
