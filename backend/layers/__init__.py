"""Parts that the models arrange. Each is loaded whole from a checkpoint: there is no layer without its weights."""
