"""Loading of models: from files or a configuration, checked, with adapters, in the precision asked for."""
