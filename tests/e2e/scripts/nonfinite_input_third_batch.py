# expect: {id: nonfinite-input, family: nonfinite, raises: null}
# at: {fqn: ['', rnn], op: null, phase: forward, step: 3}
# why: the third batch carries a gap in the recording as NaN

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Recording(Dataset):
    def __init__(self, hours=48):
        self.values = torch.sin(torch.arange(hours * 10) / 7.0).view(hours, 10, 1)
        self.values[21, 4] = torch.tensor(float("nan"))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, hour):
        return self.values[hour, :9], self.values[hour, 9]


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(1, 12, batch_first=True)
        self.next = nn.Linear(12, 1)

    def forward(self, past):
        states, _ = self.rnn(past)
        return self.next(states[:, -1])


torch.manual_seed(0)
forecast = Forecast()
optimizer = torch.optim.Adam(forecast.parameters(), lr=1e-2)
for number, (past, coming) in enumerate(DataLoader(Recording(), batch_size=8)):
    loss = nn.functional.mse_loss(forecast(past), coming)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, loss.item())
