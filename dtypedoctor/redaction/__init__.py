"""What must not leave the machine: secrets, names of people and hosts, data of a training. Standard library only: every side imports it."""
