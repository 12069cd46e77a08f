"""FedDF on CIFAR-10 in the layout of Flower's baselines."""
