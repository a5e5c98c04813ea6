"""Parameters and what holds on to them: names, snapshots, guards, optimizers."""
