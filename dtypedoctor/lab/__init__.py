"""The laboratory: makes further runs, of scenarios, with fixes, to bisect and to compare. It imports the doctor, never the reverse."""
