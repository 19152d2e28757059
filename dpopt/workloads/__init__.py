"""The workloads: data, model, loss and metric, one data set per file; see `base` for what they share."""
