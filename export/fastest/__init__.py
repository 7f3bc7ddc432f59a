"""The forms of a model measured side by side on this machine."""
