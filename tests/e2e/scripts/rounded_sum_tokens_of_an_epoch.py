# expect: {id: rounded-sum, family: silent, raises: null}
# at: {fqn: null, step: 257}
# shows: 'words 256 of'
# why: words are counted in the activations' dtype, whose spacing is 2 from 256 on

import torch
from torch import nn

torch.manual_seed(0)
vocabulary, width = 64, 32
reader = nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)).bfloat16()
optimizer = torch.optim.SGD(reader.parameters(), lr=0.05)
words, weighed = torch.zeros((), dtype=torch.bfloat16), 0

for _ in range(400):
    line = torch.randint(0, vocabulary, (1, 2))
    guess = reader(line[:, :-1])
    loss = nn.functional.cross_entropy(guess.flatten(0, 1).float(), line[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    words += line[:, 1:].numel()
    weighed += line[:, 1:].numel()

print("words", int(words), "of", weighed)
