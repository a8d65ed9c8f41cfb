"""NVIDIA FLARE: the FedAvg of its recipes, with its Client API; a round is H local steps of every site.

Server and sites are started as their provisioned kits start them, without the shell that starts them again. An
administrator hands the job in once the sites are there. The training script runs in a process that the site starts.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from workload import GPT, Workload

ADMIN = "admin@atoll.org"
PROJECT = """
api_version: 3
name: bakeoff
participants:
  - {{name: server, type: server, org: atoll, fed_learn_port: {port}, default_host: {host}, host_names: [{host}]}}
  - {{name: admin@atoll.org, type: admin, org: atoll, role: project_admin}}
{sites}
builders:
  - {{path: nvflare.lighter.impl.workspace.WorkspaceBuilder, args: {{template_file: [master_template.yml]}}}}
  - {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config}}}}
  - {{path: nvflare.lighter.impl.cert.CertBuilder}}
  - {{path: nvflare.lighter.impl.signature.SignatureBuilder}}
"""


def kits(folder):
    return folder / "flare" / "bakeoff" / "prod_00"


def provision(options):
    host, port = options.coordinator.split(":")
    sites = "\n".join(f"  - {{name: site-{rank + 1}, type: client, org: atoll}}" for rank in range(options.world))
    project = options.folder / "project.yml"
    project.write_text(PROJECT.format(host=host, port=port, sites=sites))
    words = ["provision", "-p", str(project), "-w", str(options.folder / "flare")]
    subprocess.run([sys.executable, "-m", "nvflare.cli", *words], check=True)


def command(folder, name, role):
    module, words = f"nvflare.private.fed.app.{role}.{role}_train", ["-m", str(kits(folder) / name)]
    words += ["-s", f"fed_{role}.json", "--set", "secure_train=true", "config_folder=config", "org=atoll"]
    return [sys.executable, "-m", module, *words, *([f"uid={name}"] if role == "client" else [])]


def hand_in(options):
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    torch.manual_seed(options.seed)
    start = options.folder / "start.pt"
    torch.save(GPT(options.shape, options.seq).state_dict(), start)
    session = new_secure_session(ADMIN, str(kits(options.folder) / ADMIN), timeout=60)
    patience = time.monotonic() + 10
    while (there := len(session.get_system_info().client_info)) < options.world and (
        there < 2 or time.monotonic() < patience
    ):
        time.sleep(0.2)
    recipe = FedAvgRecipe(
        name="bakeoff",
        model={"class_path": "workload.GPT", "args": {"shape": options.shape, "seq": options.seq}},
        initial_ckpt=str(start),
        min_clients=there,
        num_rounds=options.steps // options.period + 1 if options.steps else 10**6,
        train_script=__file__,
        train_args=f"train {options.folder}",
    )
    recipe.add_server_config({"server": {"task_request_interval": 0.1}})  # 2 s otherwise, for rounds of minutes
    recipe.export(str(options.folder / "jobs"))
    print("handed in", session.submit_job(str(options.folder / "jobs" / "bakeoff")), "for", there, flush=True)


if sys.argv[1:2] == ["coordinator"]:
    options = Workload.parser().parse_args(sys.argv[2:])
    new = not kits(options.folder).exists()
    if new:
        provision(options)
    server = subprocess.Popen(command(options.folder, "server", "server"))
    if new:
        hand_in(options)
    sys.exit(server.wait())

if sys.argv[1:2] != ["train"]:  # a site
    options = Workload.parser().parse_args()
    (options.folder / f"arguments-{options.rank}.json").write_text(json.dumps(sys.argv[1:]))
    site = command(options.folder, f"site-{options.rank + 1}", "client")
    os.execv(site[0], site)

import nvflare.client as flare  # noqa: E402

folder = Path(sys.argv[2])
flare.init()
rank = int(flare.get_site_name().removeprefix("site-")) - 1
work = Workload(Workload.parser().parse_args(json.loads((folder / f"arguments-{rank}.json").read_text())))
steps = work.steps()
made = kept = 0  # bench
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    kept = made  # bench
    work.model.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    for step in itertools.islice(steps, work.options.period):
        loss = work.forward()
        loss.backward()
        work.optimizer.step()
        work.record(step, loss.item(), kept=kept, lost=0)  # bench
    if work.options.steps and kept == work.options.steps:  # bench
        work.finish()  # bench
    made = step + 1  # bench
    parameters = {name: value.clone() for name, value in work.model.state_dict().items()}
    flare.send(flare.FLModel(params=parameters, meta={"NUM_STEPS_CURRENT_ROUND": work.options.period}))
