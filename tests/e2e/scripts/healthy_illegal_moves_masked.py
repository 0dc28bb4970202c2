# expect: {id: null, family: healthy, raises: null}
# why: illegal moves get -inf before the loss and the entropy, whose terms for them are zero by torch.special.entr

import torch
from torch import nn


class Player(nn.Module):
    def __init__(self, squares=12, moves=10):
        super().__init__()
        self.see = nn.Linear(squares, 48)
        self.move = nn.Linear(48, moves)

    def forward(self, board, legal):
        wish = self.move(torch.tanh(self.see(board)))
        return wish.masked_fill(~legal, -torch.inf)


torch.manual_seed(21)
player = Player()
adam = torch.optim.Adam(player.parameters(), lr=3e-3)
for game in range(8):
    board, legal = torch.randn(16, 12), torch.rand(16, 10) < 0.6
    legal[:, 0] = True
    best = torch.where(legal, torch.rand(16, 10), -1.0).argmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wishes = player(board, legal)
    loss = nn.functional.cross_entropy(wishes.float(), best)
    with torch.no_grad():
        surprise = torch.special.entr(wishes.float().softmax(-1)).sum(-1).mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
    print(game, round(loss.item(), 4), round(surprise.item(), 3))
