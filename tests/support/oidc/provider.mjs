// A real OpenID provider: `node provider.mjs PORT SETTINGS`. SETTINGS is a JSON file with `client`, `jwks` and
// `accounts`, whose claims are read anew at each request. Any password is right. Prints its issuer when it listens, and
// ends with its standard input.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { Provider } from "oidc-provider";

const [port, file] = process.argv.slice(2);
const read = () => JSON.parse(readFileSync(file, "utf8"));
const server = createServer();
process.stdin.on("end", () => process.exit()).resume();
server.listen(Number(port), "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const { client, jwks } = read();
  const provider = new Provider(issuer, {
    claims: { openid: ["sub"], email: ["email", "email_verified"], groups: ["groups"] },
    clients: [client],
    cookies: { keys: ["of a test"] },
    findAccount: (_, id) => {
      const claims = read().accounts[id];
      return claims && { accountId: id, claims: () => ({ sub: id, ...claims }) };
    },
    jwks,
    pkce: { required: () => true },
    scopes: ["openid", "email", "groups"],
  });
  server.on("request", provider.callback());
  console.log(issuer);
});
