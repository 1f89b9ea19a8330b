// Restate: registers the service, then keeps IN_FLIGHT invocations going until RUNS are done:
// `node restate_job.mjs ADMIN_PORT INGRESS_PORT SERVICE_PORT RUNS IN_FLIGHT`.
import { readFileSync } from "node:fs";

const [adminPort, ingressPort, servicePort, runs, inFlight] = process.argv.slice(2).map(Number);
const WARM_UP = 50, CONNECT_LIMIT = 60_000, PAUSE = 200;
const admin = `http://127.0.0.1:${adminPort}`, ingress = `http://127.0.0.1:${ingressPort}`;

const post = async (url, body) => {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(url, options);
  const text = await response.text();
  if (!response.ok) throw new Error(`${url}: ${response.status} ${text}`);
  return JSON.parse(text);
};

const register = async () => {
  const giveUpAt = performance.now() + CONNECT_LIMIT;
  for (;;) {
    try {
      return await post(`${admin}/deployments`, { uri: `http://127.0.0.1:${servicePort}` });
    } catch (error) {
      if (performance.now() > giveUpAt) throw error;
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
};

const complete = async (count) => {
  let started = 0, steps = 0;
  const caller = async () => {
    while (started++ < count) {
      const done = await post(`${ingress}/peer/flow`, 0);
      steps += done;
    }
  };
  await Promise.all(Array.from({ length: inFlight }, caller));
  return steps;
};

const versionOf = (name) => JSON.parse(readFileSync(`node_modules/@restatedev/${name}/package.json`, "utf8")).version;
const version = `server ${versionOf("restate-server")}, SDK ${versionOf("restate-sdk")}`;
await register();
await complete(WARM_UP);
const began = performance.now();
const steps = await complete(runs);
console.log(JSON.stringify({ event: "result", version, steps, seconds: (performance.now() - began) / 1000 }));
